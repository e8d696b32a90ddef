"""Image files of all kinds: packed, and classified by a network."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np
from PIL import Image

from scripts.fuzzing.mutations import mutate_bytes
from scripts.fuzzing.surface import EQUAL, OTHER, WRONG, Outcome, Surface, attempt, run_command
from scripts.fuzzing.training import make_pack, run_settings, train

SUFFIXES = (".jpg", ".png", ".gif", ".bmp", ".tif", ".webp", ".ppm")


def make_pictures(folder: Path, count: int, suffixes: tuple[str, ...]) -> list[Path]:
    """Smooth colour pictures of 20x16 pixels in three folders, of these kinds in turn."""
    draw = np.random.default_rng(0)
    made = []
    for number in range(count):
        coarse = draw.integers(256, size=(4, 4, 3), dtype=np.uint8)
        path = folder / f"class{number % 3}" / f"{number}{suffixes[number % len(suffixes)]}"
        path.parent.mkdir(parents=True, exist_ok=True)
        options = {"quality": 90} if path.suffix in (".jpg", ".webp") else {}
        Image.fromarray(coarse).resize((20, 16)).save(path, **options)
        made.append(path)
    return made


class Pictures(Surface):
    """`pack` and `predict` of a folder in which one file is damaged."""

    name = "pictures"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.images = folder / "images"
        shutil.rmtree(self.images, ignore_errors=True)
        self.files = make_pictures(self.images, 21, SUFFIXES)
        make_pack(folder / "pack.h5")
        shutil.rmtree(folder / "net", ignore_errors=True)
        train(run_settings(folder, run="net", epochs=1))
        self.sound = [self.pack(), self.predict()]

    def control(self) -> list[str]:
        again = [attempt(self.pack), attempt(self.predict)]
        return [] if again == self.sound else [f"the sound files: {again}, not {self.sound}"]

    def pack(self) -> tuple[int, int]:
        """The exit code of packing, and the rows of the pack."""
        from hpctrain.data.packed import read_pack

        output = self.folder / "out.h5"
        words = ["--jobs", "1", "--size", "9x7", "--output", str(output), "--overwrite"]
        code, _ = run_command("pack", str(self.images), *words)
        return code, sum(split.rows for split in read_pack(output).splits.values())

    def predict(self) -> tuple[int, list[str]]:
        """The exit code of predicting, and the lines of all files."""
        output = self.folder / "out.csv"
        output.unlink(missing_ok=True)
        words = ["--runs-dir", str(self.folder), "--output", str(output)]
        code, _ = run_command("predict", "net", str(self.images), *words)
        return code, output.read_text().splitlines()

    def trial(self, draw: random.Random) -> tuple[str, Outcome]:
        path = draw.choice(self.files)
        sound = path.read_bytes()
        data = bytearray(sound)
        what = mutate_bytes(data, draw, 64)
        path.write_bytes(data)
        try:
            if draw.random() < 0.5:
                found = attempt(self.pack, path.name)
                verb, outcome = "pack", self.packed(found)
            else:
                found = attempt(self.predict, path.name)
                verb, outcome = "predict", self.predicted(found, path.name)
        finally:
            path.write_bytes(sound)
        return f"{verb}, {path.name}, {what}", outcome

    def packed(self, found: Outcome | tuple[int, int]) -> Outcome:
        """Pixels may be others; images may not be fewer."""
        if isinstance(found, Outcome):
            return found
        return Outcome(OTHER if found == self.sound[0] else WRONG, f"{found}")

    def predicted(self, found: Outcome | tuple[int, list[str]], name: str) -> Outcome:
        """The answers for all other files are the same."""
        if isinstance(found, Outcome):
            return found
        lines, sound = ([x for x in f[1] if name not in x] for f in (found, self.sound[1]))
        if lines != sound:
            return Outcome(WRONG, f"other answers for files that are sound: exit code {found[0]}")
        return Outcome(EQUAL if found == self.sound[1] else OTHER)
