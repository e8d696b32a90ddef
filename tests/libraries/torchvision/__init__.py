"""Stands in for torchvision."""

from torchvision import models

__version__ = "0.0"
__all__ = ["models"]
