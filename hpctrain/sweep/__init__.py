"""Many networks at once: a driver that launches ordinary training runs side by side."""
