"""What `pack` takes besides folders: .tgz, .zip, .npz and idx files."""

from __future__ import annotations

import gzip
import random
import shutil
import struct
import tarfile
import zipfile
from pathlib import Path

import numpy as np

from scripts.fuzzing.mutations import mutate_bytes
from scripts.fuzzing.pictures import make_pictures
from scripts.fuzzing.surface import OTHER, WRONG, Outcome, Surface, attempt, run_command
from scripts.fuzzing.training import make_images


def make_sources(folder: Path) -> list[Path]:
    """The same images in all kinds of files."""
    made = make_pictures(folder / "images", 12, (".jpg", ".png"))
    for name, mode in (("a.tgz", "w:gz"), ("a.tar", "w")):
        with tarfile.open(folder / name, mode) as tar:
            for path in made:
                tar.add(path, str(path.relative_to(folder / "images")))
    with zipfile.ZipFile(folder / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in made:
            archive.write(path, str(path.relative_to(folder / "images")))
    images, labels = make_images(17, (7, 9, 1), 0)
    np.savez(folder / "a.npz", images=images[..., 0], labels=labels)
    np.savez_compressed(folder / "b.npz", x_train=images, y_train=labels.astype("S3"))
    head = struct.pack(">HBB3I", 0, 8, 3, 17, 7, 9)
    (folder / "a-images-idx3-ubyte").write_bytes(head + images.tobytes())
    end = struct.pack(">HBBI", 0, 8, 1, 17) + labels.astype(np.uint8).tobytes()
    (folder / "a-labels-idx1-ubyte").write_bytes(end)
    (folder / "b-images-idx3-ubyte.gz").write_bytes(gzip.compress(head + images.tobytes()))
    (folder / "b-labels-idx1-ubyte.gz").write_bytes(gzip.compress(end))
    names = ("a.tgz", "a.tar", "a.zip", "a.npz", "b.npz")
    idx = ("a-images-idx3-ubyte", "a-labels-idx1-ubyte", "b-images-idx3-ubyte.gz")
    return [folder / name for name in (*names, *idx, "b-labels-idx1-ubyte.gz")]


class Archives(Surface):
    """Packed, or refused: pixels may be others where the file has no checksum."""

    name, weight = "archives", 1.5

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        shutil.rmtree(folder)
        folder.mkdir()
        self.files = make_sources(folder)

    def control(self) -> list[str]:
        found = {path.name: self.pack(path) for path in self.files}
        return [f"{name}: {each}" for name, each in found.items() if each.kind != OTHER]

    def pack(self, path: Path) -> Outcome:
        """What packing gives: exit code and rows."""
        from hpctrain.data.packed import read_pack, verify

        output = self.folder / "out.h5"
        source = path.with_name(path.name.replace("labels-idx1", "images-idx3"))

        def make() -> tuple[int, int]:
            words = ["--jobs", "1", "--output", str(output), "--overwrite"]
            words += ["--size", "9x7", "--split", "0.7,0.3"]
            code, _ = run_command("pack", str(source), *words)
            pack = read_pack(output)
            damage = verify(pack)
            return code if not damage else -1, sum(split.rows for split in pack.splits.values())

        found = attempt(make, path.name, source.name, "class")
        if isinstance(found, Outcome):
            return found
        return Outcome(OTHER if found[0] == 0 and found[1] > 1 else WRONG, str(found))

    def trial(self, draw: random.Random) -> tuple[str, Outcome]:
        path = draw.choice(self.files)
        sound = path.read_bytes()
        data = bytearray(sound)
        what = mutate_bytes(data, draw, 256)
        path.write_bytes(data)
        try:
            return f"{path.name}, {what}", self.pack(path)
        finally:
            path.write_bytes(sound)
