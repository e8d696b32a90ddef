"""Image files -> pack -> batches. Knows nothing of MPI."""
