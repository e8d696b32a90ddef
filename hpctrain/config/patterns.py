"""Patterns of parameter names in settings."""

from __future__ import annotations

import math

from hpctrain.errors import UsageError


def patterns(text: str, flag: str) -> list[str]:
    """Parse patterns of parameter names, such as "conv1,layer1.*". Raises UsageError."""
    found = [part.strip() for part in text.split(",")]
    if not all(found):
        raise UsageError(f"{flag} {text!r}: give patterns of parameter names, as in conv1,layer1.*")
    return found


def learning_rate_factors(text: str, flag: str = "--lr-factors") -> list[tuple[str, float]]:
    """Parse "layer*=0.1,fc=1" to patterns of parameter names and factors. Raises UsageError."""
    found = []
    for part in text.split(","):
        pattern, _, number = (word.strip() for word in part.partition("="))
        try:
            factor = float(number)
        except ValueError:
            factor = 0.0
        if not pattern or not 0 < factor < math.inf:
            raise UsageError(
                f"{flag} {text}: give patterns of parameter names with factors above 0, as in"
                " layer*=0.1,fc=1"
            )
        found.append((pattern, factor))
    return found
