"""Packs of pixels and of JPEG files: their bytes, and what h5py finds in them."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import h5py
import numpy as np

from hpctrain.config import Config, PackConfig
from hpctrain.data.pack import make_pack
from scripts.fuzzing.mutations import mutate_bytes
from scripts.fuzzing.pictures import make_pictures
from scripts.fuzzing.surface import Outcome, Surface, attempt, compared
from scripts.fuzzing.training import one_step

MODES = ("start", "first-touch", "never")
ODD = (
    0,
    -1,
    2**40,
    float("nan"),
    "x",
    b"\xff",
    np.zeros(0),
    np.zeros((2, 2)),
    np.array(["a", "b"], h5py.string_dtype()),
    h5py.Empty("f"),
)


class Packs(Surface):
    """One step of training and the test, with --verify start, first-touch and never."""

    name, weight = "packs", 2.0

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        make_pictures(folder / "images", 24, (".jpg",))
        settings = PackConfig(
            str(folder / "images"), size="10x8", split="0.7,0.3", overwrite=True, jobs=1
        )
        self.packs = []
        for encoding in ("raw", "jpeg"):
            path = folder / f"{encoding}.h5"
            make_pack(dataclasses.replace(settings, output=str(path), encoding=encoding))
            self.packs.append(path)
        self.sound = [attempt(lambda path=path: self.step(path, "start")) for path in self.packs]

    def control(self) -> list[str]:
        return [
            f"{path.name}, --verify {mode}: {found}"
            for path, sound in zip(self.packs, self.sound, strict=True)
            for mode in MODES
            if (found := attempt(lambda p=path, m=mode: self.step(p, m))) != sound
            or isinstance(found, Outcome)
        ]

    def step(self, path: Path, mode: str) -> str:
        """What training on this pack gives."""
        model = {"model": "digits", "normalize": "pack"}
        return one_step(
            Config(data=str(path), batch_size=7, verify=mode, deterministic=True, **model)
        )

    def trial(self, draw: random.Random) -> tuple[str, Outcome]:
        kind, mode = draw.randrange(len(self.packs)), draw.choice(MODES)
        target = self.folder / "mutated.h5"
        data = bytearray(self.packs[kind].read_bytes())
        structured = draw.random() < 0.3
        what = "" if structured else mutate_bytes(data, draw)
        target.write_bytes(data)
        if structured:
            what = mutate_structure(target, draw)
        found = attempt(lambda: self.step(target, mode), target.name)
        what = f"{self.packs[kind].name}, {what}, --verify {mode}"
        # A file that h5py wrote may say other things and hold the checksums of them.
        return what, compared(found, self.sound[kind], mode == "never" or structured)


def mutate_structure(path: Path, draw: random.Random) -> str:
    """Change an attribute or a data set by h5py; what was done."""
    with h5py.File(path, "r+") as file:
        places: list[h5py.HLObject] = [file]
        file.visititems(lambda name, item: places.append(item))
        place = draw.choice(places)
        if len(place.attrs) and draw.random() < 0.6:
            name, value = draw.choice(list(place.attrs)), draw.choice(ODD)
            del place.attrs[name]
            if draw.random() < 0.8:
                place.attrs[name] = value
                return f"attribute {name} of {place.name} becomes {value!r:.30}"
            return f"attribute {name} of {place.name} is gone"
        if place.name == "/":
            place = draw.choice(places[1:])
        name, value = place.name, draw.choice(ODD)
        del file[name]
        if draw.random() < 0.8:
            file[name] = value
            return f"{name} becomes {value!r:.30}"
        return f"{name} is gone"
