"""``hpctrain bench``: hpctrain, its limit and DDP in turn. ``command.py`` runs it."""
