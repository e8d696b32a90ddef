"""A stand-in for timm, with the few functions that hpctrain calls."""
