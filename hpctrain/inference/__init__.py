"""Trained networks in use: evaluate, predict, and the file that holds one."""
