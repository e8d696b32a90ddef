"""The surfaces of scripts/fuzz: what hpctrain reads, mutated in one way or another."""
