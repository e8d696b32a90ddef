"""What a network learns: a module for each task."""
