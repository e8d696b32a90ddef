"""Everything that crosses ranks. Knows nothing of images."""
