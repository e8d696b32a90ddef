"""Make packs: sources -> decoded rows -> splits -> HDF5. Readers of packs do not import this."""
