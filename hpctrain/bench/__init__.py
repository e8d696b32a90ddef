"""``hpctrain bench``: training, reading and Allreduce against their limits. See ``command.py``."""
