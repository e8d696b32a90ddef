"""``hpctrain doctor``: facts of all ranks -> findings with verdicts. ``command.py`` runs it."""
