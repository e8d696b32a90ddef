"""Sweeps: their networks (``file.py``), and the driver that trains them (``driver.py``)."""
