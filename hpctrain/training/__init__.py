"""The training loop and its step."""
