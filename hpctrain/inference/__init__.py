"""Inference with trained networks: evaluation, prediction, and the file of a network."""
