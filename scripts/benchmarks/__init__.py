"""Measurements of hpctrain: what the pages of docs/ cite. ``__main__.py`` lists them."""
