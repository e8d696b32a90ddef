"""External HDF5 files: contiguous, chunked, compressed, with fletcher32."""

from __future__ import annotations

import random
from pathlib import Path

import h5py
import numpy as np

from hpctrain.config import Config
from scripts.fuzzing.mutations import mutate_bytes
from scripts.fuzzing.surface import Outcome, Surface, attempt, compared
from scripts.fuzzing.training import make_images, one_step

KINDS = {
    "contiguous": {},
    "chunked": {"chunks": (4, 8, 8, 1)},
    "gzip": {"chunks": (4, 8, 8, 1), "compression": "gzip"},
    "lzf": {"chunks": (4, 8, 8, 1), "compression": "lzf", "shuffle": True},
    "fletcher32": {"chunks": (4, 8, 8, 1), "fletcher32": True},
    "floats": {"dtype": "float32"},
}


class Foreign(Surface):
    """One step of training and the test with --images and --labels. Nothing but fletcher32 tells
    whether pixels are as they were, so most may come out as others."""

    name, weight = "foreign", 1.5

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        images, labels = make_images(41, (8, 8, 1), 0)
        self.files = []
        for name, storage in KINDS.items():
            path = folder / f"{name}.h5"
            with h5py.File(path, "w") as file:
                values = images if name != "floats" else (images / np.float32(255))
                file.create_dataset("x", data=values, **storage)
                file["y"] = labels
            self.files.append(path)
        self.sound = [attempt(lambda path=path: self.step(path)) for path in self.files]

    def control(self) -> list[str]:
        again = [attempt(lambda path=path: self.step(path)) for path in self.files]
        pairs = zip(self.files, again, self.sound, strict=True)
        return [
            f"{path.name}: {found}"
            for path, found, sound in pairs
            if isinstance(found, Outcome) or found != sound
        ]

    def step(self, path: Path) -> str:
        """What training on this file gives."""
        names = {"images": "x", "labels": "y", "split": "0.7,0.3"}
        net = {"model": "digits", "deterministic": True, "batch_size": 7}
        return one_step(Config(data=str(path), **names, **net))

    def trial(self, draw: random.Random) -> tuple[str, Outcome]:
        number = draw.randrange(len(self.files))
        data = bytearray(self.files[number].read_bytes())
        what = mutate_bytes(data, draw)
        target = self.folder / "mutated.h5"
        target.write_bytes(data)
        found = attempt(lambda: self.step(target), target.name)
        outcome = compared(found, self.sound[number], may_differ=True)
        return f"{self.files[number].name}, {what}", outcome
