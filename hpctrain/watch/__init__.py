"""``hpctrain watch``: read the folders of runs while they train, without MPI or torch."""
