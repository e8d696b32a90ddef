"""Everything that ranks exchange, independent of images."""
