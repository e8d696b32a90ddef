"""``scripts/gpu_check``: all that can only be seen on a GPU, row by row. ``check.py`` runs it."""
