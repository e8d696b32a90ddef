"""``hpctrain watch``: runs as they learn, in the terminal or on a page of the browser."""
