"""Surfaces of data: packs, external HDF5 files, and the sources of `pack` and `predict`."""

from __future__ import annotations

import dataclasses
import random
import tarfile
import zipfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import h5py
import numpy as np

from hpctrain.config import PackConfig
from hpctrain.data.pack import read_pack
from hpctrain.data.split import find_corrupt
from hpctrain.packing.make import make_pack as pack_images
from scripts.fuzzing.inputs import (
    make_image_files,
    make_images,
    make_pack,
    one_step,
    run_settings,
    train,
)
from scripts.fuzzing.surface import Case, Surface, run_command

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
STORAGE = {  # no chunks: a corrupt index of chunks may crash HDF5
    "contiguous": {},
    "floats": {"dtype": "float32"},
}
SUFFIXES = (".jpg", ".png", ".gif", ".bmp", ".tif", ".webp", ".ppm")


class Packs(Surface):
    """Packs of pixels and of JPEG files: one training step and the test, with --verify or not."""

    name, weight = "packs", 2.0

    def make_cases(self) -> Sequence[Case]:
        make_image_files(self.folder / "images", 24, (".jpg",))
        source, target = str(self.folder / "images"), self.folder / "mutated.h5"
        settings = PackConfig(source, size="10x8", split="0.7,0.3", jobs=1)
        cases = []
        for encoding in ("raw", "jpeg"):
            path = self.folder / f"{encoding}.h5"
            pack_images(dataclasses.replace(settings, output=str(path), encoding=encoding))
            sound = one_step(data=str(path), normalize="pack")
            for verify in (True, False):
                use = partial(one_step, data=str(target), verify=verify, normalize="pack")
                what = f"{path.name}, {'--verify' if verify else '--no-verify'}"
                cases.append(Case(what, path, target, use, sound, (target.name,), not verify))
        return cases

    def mutate(self, case: Case, draw: random.Random) -> tuple[bytes, str, bool]:
        if draw.random() >= 0.3:
            return super().mutate(case, draw)
        case.target.write_bytes(case.sound.read_bytes())
        what = mutate_structure(case.target, draw)
        # A file rewritten by h5py may hold other values with checksums that match them.
        return case.target.read_bytes(), what, True


def mutate_structure(path: Path, draw: random.Random) -> str:
    """Change or delete an attribute or a dataset with h5py; return what was done."""
    with h5py.File(path, "r+") as file:
        places: list[h5py.HLObject] = [file]
        file.visititems(lambda name, item: places.append(item))
        place = draw.choice(places)
        if len(place.attrs) and draw.random() < 0.6:
            parent, name, what = place.attrs, draw.choice(list(place.attrs)), place.name
        else:
            parent, name, what = file, draw.choice(places[1:]).name, ""
        value = draw.choice(ODD)
        del parent[name]
        if draw.random() < 0.8:
            parent[name] = value
            return f"{what} {name} becomes {value!r:.30}"
        return f"{what} {name} is gone"


class External(Surface):
    """HDF5 files that are not packs: one training step and the test with --images and --labels.

    Nothing detects changed pixels, so most results may differ.
    """

    name, weight = "external", 1.5

    def make_cases(self) -> Sequence[Case]:
        images, labels = make_images(41, (8, 8, 1), 0)
        names, target = (
            {"images": "x", "labels": "y", "split": "0.7,0.3"},
            self.folder / "mutated.h5",
        )
        cases = []
        for name, storage in STORAGE.items():
            path = self.folder / f"{name}.h5"
            with h5py.File(path, "w") as file:
                values = images if name != "floats" else (images / np.float32(255))
                file.create_dataset("x", data=values, **storage)
                file["y"] = labels
            sound = one_step(data=str(path), **names)
            use = partial(one_step, data=str(target), **names)
            cases.append(Case(path.name, path, target, use, sound, (target.name,), True))
        return cases


class Archives(Surface):
    """Sources of `pack` other than folders: .tgz, .tar and .zip files.

    They are packed or refused; pixels may differ if the file has no checksum.
    """

    name, weight, head = "archives", 1.5, 256

    def make_cases(self) -> Sequence[Case]:
        cases = []
        for path in make_archives(self.folder):
            use = partial(self.pack, path)
            names = (path.name, "class")
            cases.append(Case(path.name, path, path, use, use(), names, may_differ=True))
        return cases

    def pack(self, source: Path) -> int:
        """Pack a source; return the number of samples in the pack."""
        output = self.folder / "out.h5"
        words = ["--jobs", "1", "--output", str(output), "--overwrite"]
        code, _ = run_command("pack", str(source), *words, "--size", "9x7", "--split", "0.7,0.3")
        pack = read_pack(output)
        rows = sum(split.samples for split in pack.splits.values())
        if code or (corrupt := [*find_corrupt(pack)]) or rows < 2:
            raise AssertionError(f"exit code {code}, {rows} rows, {corrupt}")
        return rows


def make_archives(folder: Path) -> list[Path]:
    """Write image files to archives."""
    made = make_image_files(folder / "images", 12, (".jpg", ".png"))
    for name, mode in (("a.tgz", "w:gz"), ("a.tar", "w")):
        with tarfile.open(folder / name, mode) as tar:
            for path in made:
                tar.add(path, str(path.relative_to(folder / "images")))
    with zipfile.ZipFile(folder / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in made:
            archive.write(path, str(path.relative_to(folder / "images")))
    return sorted(path for path in folder.iterdir() if path.is_file())


class ImageFiles(Surface):
    """`pack` and `predict` of a folder with image files of all kinds, one of them corrupt."""

    name, head = "images", 64

    def make_cases(self) -> Sequence[Case]:
        files = make_image_files(self.folder / "images", 21, SUFFIXES)
        make_pack(self.folder / "pack.h5")
        train(run_settings(self.folder, run="net", epochs=1))
        rows, lines = self.pack(), self.predict("")
        cases = []
        for path in files:
            # Pixels may change, but not the number of images or the predictions of other files.
            others = [line for line in lines if path.name not in line]
            for name, use, sound in (
                ("pack", self.pack, rows),
                ("predict", partial(self.predict, path.name), others),
            ):
                cases.append(Case(f"{name}, {path.name}", path, path, use, sound, (path.name,)))
        return cases

    def controls(self) -> Sequence[Case]:
        return self.cases[:2]

    def pack(self) -> tuple[int, int]:
        """Return the exit code of packing and the number of samples in the pack."""
        output = self.folder / "out.h5"
        words = ["--jobs", "1", "--size", "9x7", "--output", str(output), "--overwrite"]
        code, _ = run_command("pack", str(self.folder / "images"), *words)
        return code, sum(split.samples for split in read_pack(output).splits.values())

    def predict(self, but: str) -> list[str]:
        """Return the lines of predictions for all files except `but`."""
        output = self.folder / "out.csv"
        output.unlink(missing_ok=True)
        words = ["--runs-dir", str(self.folder), "--output", str(output)]
        run_command("predict", "net", str(self.folder / "images"), *words)
        return [line for line in output.read_text().splitlines() if not but or but not in line]
