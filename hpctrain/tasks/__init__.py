"""Tasks that a network can learn, a module each."""
