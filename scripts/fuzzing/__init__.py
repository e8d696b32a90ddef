"""The surfaces of scripts/fuzz: kinds of input of hpctrain, and their mutations."""
