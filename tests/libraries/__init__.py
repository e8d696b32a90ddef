"""Stand-ins for timm and torchvision, with the few functions that hpctrain calls."""
