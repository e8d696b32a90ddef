"""``scripts/gpu_check``: all checks that need a GPU, row by row. ``check.py`` runs them."""
