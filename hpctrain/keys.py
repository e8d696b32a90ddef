"""Random keys hashed from what they are for: (seed, epoch, step, shard, purpose).

Hashed, never added: with sums, (seed 1, epoch 0) and (seed 0, epoch 1) would draw the same
numbers. A key depends on nothing else, so no generator state needs saving and any number of
ranks draws the same numbers.
"""

from __future__ import annotations

import hashlib


def random_key(*parts: int | str) -> int:
    """A 63-bit integer from `parts`, by BLAKE2b over their unambiguous text."""
    text = "|".join(f"{type(part).__name__}:{part!r}" for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
