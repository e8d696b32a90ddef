"""``scripts/cluster_check``: what a new site can do, in one report."""
