"""Permutations of 0 ... n-1 of which any part can be had without the rest.

Small ones are drawn and kept. Larger ones are computed where they are asked for, in no memory: a
Feistel network (Luby and Rackoff 1988) is a bijection of the numbers of an even count of bits, and
walking along its cycles until a number is below n (Black and Rogaway 2002) makes one of 0 ... n-1.

Both are made of raw bits alone, so equal keys give equal orders with every NumPy: it promises to
keep the raw output of PCG64 for a seed, but not `Generator.permutation` (NEP 19).
"""

from __future__ import annotations

import numpy as np

from hpctrain.keys import random_key

KEPT = 1 << 22  # numbers, 32 MiB
ROUNDS = 6


class Permutation:
    """A permutation of 0 ... n-1 that is a pure function of n and the key."""

    def __init__(self, n: int, key: int, kept: int = KEPT) -> None:
        self.n = n
        self._drawn = random_order(n, key) if n <= kept else None
        self._half = np.uint64(max(1, -(-(n - 1).bit_length() // 2)))  # bits of each half
        self._mask = np.uint64((1 << int(self._half)) - 1)
        self._keys = [np.uint64(random_key(key, "round", r)) for r in range(ROUNDS)]

    def __call__(self, places: np.ndarray) -> np.ndarray:
        """The numbers at these places, of the same shape, int64."""
        if self._drawn is not None:
            return self._drawn[places]
        numbers = self._network(places.astype(np.uint64))
        while (beyond := numbers >= self.n).any():
            numbers[beyond] = self._network(numbers[beyond])
        return numbers.astype(np.int64)

    def _network(self, numbers: np.ndarray) -> np.ndarray:
        left, right = numbers >> self._half, numbers & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mixed(right ^ key) & self._mask)
        return (left << self._half) | right


def random_order(n: int, key: int) -> np.ndarray:
    """0 ... n-1 in random order, (n,) int64: sorted by words of PCG64, without as many of their low
    bits as n-1 has. There the number itself is put, so words can be sorted in place of an index,
    which is ten times as fast; where the high bits are equal the smaller number comes first.
    """
    bits = np.uint64(max(n - 1, 0).bit_length())
    words = np.random.PCG64(key).random_raw(n)
    words >>= bits
    words <<= bits
    words |= np.arange(n, dtype=np.uint64)
    words.sort()
    words &= (np.uint64(1) << bits) - np.uint64(1)
    return words.view(np.int64)


def _mixed(x: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele, Lea and Flood 2014): every bit depends on all."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
