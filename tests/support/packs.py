"""Small packs for tests, made from arrays."""

from __future__ import annotations

import hashlib
import json
import uuid
from pathlib import Path

import h5py
import numpy as np

import hpctrain as hp
from tests.support.api import make_order


def draw_images(rng, rows, shape, classes):
    """Images that can be learnt, each class brighter in its own band of lines, and labels."""
    labels = rng.integers(0, classes, rows)
    images = rng.integers(0, 100, (rows, *shape), dtype=np.uint8)
    for image, label in zip(images, labels, strict=True):
        image[label * shape[0] // classes :][: max(1, shape[0] // classes)] += 120
    return images, labels


def draw_entries(rng, rows, shape):
    """Images that can be learnt, which of three classes they have, (rows, 3) uint8, and two values,
    (rows, 2) float32. Of both a fourth is unknown, and all of the first rows.
    """
    present = rng.integers(0, 2, (rows, 3), dtype=np.uint8)
    images = rng.integers(0, 100, (rows, *shape), dtype=np.uint8)
    for image, bands in zip(images, present, strict=True):
        for band, is_bright in zip(np.array_split(image, 3), bands, strict=True):
            band += 120 * is_bright
    values = np.stack([1000 + 50 * present.sum(1), images.mean((1, 2, 3)) / 255], 1)
    values = values.astype(np.float32)
    for targets, unknown in ((present, 255), (values, np.nan)):
        targets[rng.random(targets.shape) < 0.25] = unknown
        targets[:6] = unknown
    return images, present, values


def write_entries(path, task, **rows):
    """A pack for a task of `draw_entries`, with the rows of each split as slices."""
    images, present, values = draw_entries(np.random.default_rng(0), 140, (12, 12, 1))
    targets = values
    names = {"columns": ["sum", "share"]}
    if task == "multilabel":
        targets = present
        names = {"classes": ["a", "b", "c"]}
    splits = {split: (images[chosen], targets[chosen]) for split, chosen in rows.items()}
    hp.write_pack(path, splits, **names)


def make_pack(
    path: Path,
    rows: dict[str, int],
    shape: tuple[int, int, int] = (28, 28, 1),
    classes: int = 10,
    seed: int = 0,
) -> Path:
    """A pack of images that can be learnt."""
    rng = np.random.default_rng(seed)
    splits = {name: draw_images(rng, count, shape, classes) for name, count in rows.items()}
    names = tuple(f"class{k}" for k in range(classes))
    hp.write_pack(path, splits, names, {"source": "test"}, overwrite=True)
    return path


def sign_pack(path):
    """Give a pack the identity of its attributes and checksums, whatever they are."""
    with h5py.File(path, "r+", locking=False) as file:
        known = dict(file.attrs)
        facts = {name: known[name].tolist() for name in ("image_shape", "mean", "std")}
        facts |= {name: json.loads(known[name]) for name in ("provenance", "targets", "scale")}
        facts |= {"fit": known["fit"].decode(), "classes": [n.decode() for n in known["classes"]]}
        described = json.dumps(["hpctrain-pack", int(known["version"]), facts], sort_keys=True)
        digest = hashlib.sha256(described.encode())
        for split in ("train", "validation"):
            digest.update(json.dumps(split).encode() + file[f"{split}/crc32"][:].tobytes())
        identity = str(uuid.UUID(bytes=digest.digest()[:16])).encode()
        file["identity"][...] = np.frombuffer(identity, np.uint8)


def places(partition, step, shard):
    """The places in the shard's epoch that it reads in `step`."""
    first = step * partition.shares[shard]
    return slice(first, first + partition.count(step, shard))


def order_of(partition, seed, epoch, shard):
    """The shard's rows in the order of this epoch, as `--shuffle partition` reads them."""
    return make_order("partition", partition, seed).samples(epoch, shard, 0, partition.sizes[shard])
