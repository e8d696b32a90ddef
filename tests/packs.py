"""Small packs for tests, made from arrays."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np

from hpctrain.data.orders import Order
from hpctrain.data.pack import write_pack
from hpctrain.data.pack_format import Part
from hpctrain.data.packing.decode import Span, Written
from hpctrain.data.packing.write import DatasetLayout, PackFacts, PackWriter, lay_out
from hpctrain.data.split import Split
from hpctrain.files import whole_file


def make_pack(
    path: Path,
    rows: dict[str, int],
    shape: tuple[int, int, int] = (28, 28, 1),
    classes: int = 10,
    seed: int = 0,
) -> Path:
    """A pack of images that can be learnt: each class is brighter in its own band of lines."""
    rng = np.random.default_rng(seed)
    splits = {}
    for name, count in rows.items():
        labels = rng.integers(0, classes, count)
        images = rng.integers(0, 100, (count, *shape), dtype=np.uint8)
        for image, label in zip(images, labels, strict=True):
            top = label * shape[0] // classes
            image[top : top + max(1, shape[0] // classes)] += 120
        splits[name] = (images, labels.astype(np.int64))
    write_pack(path, splits, tuple(f"class{k}" for k in range(classes)), {"source": "test"})
    return path


def part_of(pack, samples):
    """The part of the training split of a pack with these samples."""
    with Split(pack, "train", threads=1) as split:
        return Part(samples, range(*split.byte_range(samples)))


def places(partition, step, shard):
    """The places in the shard's epoch that it reads in `step`."""
    first = step * partition.shares[shard]
    return slice(first, first + partition.count(step, shard))


def order_of(partition, seed, epoch, shard):
    """The shard's rows in the order of this epoch, as `--shuffle partition` reads them."""
    return Order(partition, seed).samples(epoch, shard, 0, partition.sizes[shard])


class _HoleWriter(PackWriter):
    """Writes a pack whose numbers are all zeros, as holes of a sparse file."""

    def write_numbers(self, split, name, values):
        dataset = next(d for d in self.datasets if (d.split, d.name) == (split, name))
        self._checksums[split, name] = zero_checksums(dataset)


def zero_checksums(dataset: DatasetLayout) -> np.ndarray:
    """The CRC-32 of every block of a dataset of zeros."""
    block = dataset.block_rows
    sums = np.full(-(-dataset.shape[0] // block), zlib.crc32(bytes(block * dataset.row_bytes)))
    sums[-1] = zlib.crc32(bytes(((dataset.shape[0] - 1) % block + 1) * dataset.row_bytes))
    return sums.astype("<u4")


def make_sparse_pack(
    path: Path,
    rows: dict[str, int],
    shape: tuple[int, int, int] = (8, 8, 1),
    classes: int = 10,
    file_bytes: int = 0,
) -> Path:
    """A pack of black images of class 0, as many as you like: its file takes next to no disk.

    With `file_bytes`, a pack of JPEG files of that size, which are missing; so are their offsets.
    """
    sizes = {name: count * file_bytes for name, count in rows.items()} if file_bytes else None
    with whole_file(path) as file:
        writer = _HoleWriter(file, lay_out(rows, shape, sizes))
        for d in writer.images():
            span, sums = Span("", d.split, 0, 0, 0, 0, 0), np.zeros((2, shape[2]))
            writer.add(Written(span, zero_checksums(d), sums))
        for dataset in writer.datasets:
            writer.write_numbers(dataset.split, dataset.name, np.empty(0))
        names = tuple(f"class{k}" for k in range(classes))
        facts = PackFacts(shape, names, {"source": "holes"}, "stretch" if file_bytes else "")
        writer.finish(facts, {name: range(count) for name, count in rows.items()})
    return path
