"""Names of splits and classes, as folders and tables write them.

Names of classes are in the normalization NFC of Unicode, and in order of their names, or of their
numbers if all are whole numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from hpctrain.data.pack import ALIASES
from hpctrain.text import listed_names

SPLIT_NUMBERS = {name: i for i, names in enumerate(ALIASES.values()) for name in names}
NO_SPLIT = NO_GROUP = -1


def split_number(name: str) -> int:
    """Return the index in SPLITS of names such as "val", "test_data", "train2017", or NO_SPLIT."""
    word = re.sub(r"[-_ ]?(19|20)\d\d$", "", name.lower())
    word = re.sub("[-_ ]?(data|set|dataset|split|images|imgs)$", "", word)
    return SPLIT_NUMBERS.get(word, NO_SPLIT)


def class_order(names: Iterable[str]) -> tuple[str, ...]:
    """Return distinct names of classes in order: that of numbers if all are whole numbers."""
    order = sorted({*names})
    if all(re.fullmatch(r"[+-]?\d{1,18}(\.0*)?", name) for name in order):  # "1.0": of pandas
        order.sort(key=lambda name: (int(name.partition(".")[0]), name))
    return tuple(order)


def class_notes(spellings: Mapping[str, set[str]]) -> list[str]:
    """Return notes on classes that have several `spellings`, and on names that are nearly equal."""
    similar: dict[str, list[str]] = {}
    for name in sorted(spellings):
        key = "".join(name.casefold().split())
        key = re.sub(r"^0*(\d+)(\.0*)?$", r"\1", key)  # "7", "07" and "7.0"
        similar.setdefault(key, []).append(name)
    merged = sorted(name for name, ways in spellings.items() if len(ways) > 1)
    apart = [name for names in similar.values() if len(names) > 1 for name in names]
    notes = []
    if merged:
        notes.append(
            "names that differ in Unicode normalization, or in spaces around them, are one class:"
            f" {listed_names(merged)}"
        )
    if apart:
        notes.append(
            "names that differ in case, spaces or zeros alone are classes of their own:"
            f" {listed_names(map(repr, apart))}"
        )
    return notes


def number_names(column: Sequence[str]) -> tuple[tuple[str, ...], np.ndarray]:
    """Return the distinct values in order, and the index (N,) int32 of each value among them."""
    distinct = class_order(column)
    numbers = {value: number for number, value in enumerate(distinct)}
    return distinct, np.array([numbers[value] for value in column], np.int32)
