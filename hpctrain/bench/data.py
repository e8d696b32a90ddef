"""``hpctrain bench data``: how fast batches are ready to train, one core each, from the page cache.

    python -m hpctrain bench data

The same images of 100x100x3 as a pack of pixels, as a pack of JPEG files and as HDF5 files of
somebody else, in all orders, against a copy in memory, h5py and torch's DataLoader over h5py; and
packing them against one thread of Pillow. Every contestant is a process (``readers.py``), started
in turn; ratios are of medians over interleaved rounds. ``--data`` may name any source of ``pack``.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hpctrain.bench.jobs import run_job
from hpctrain.bench.report import machine_lines, number_text
from hpctrain.config import BenchConfig, PackConfig

if TYPE_CHECKING:
    from rich.table import Table

    from hpctrain.data.pack_format import Pack

FILES, CLASSES = 2000, 5  # image files that are made
FILE_SIDES = (500, 375)  # pixels, as photographs on the web have
COPIES = 2  # of each image, so that an epoch takes long enough
CHUNK_ROWS = 32

Rates = dict[str, list[float]]  # by contestant, images/s by round


class Target(NamedTuple):
    """`who` is to reach `factor` times `against`, or images/s where nothing is named."""

    who: str
    factor: float
    against: str = ""


TARGETS = (
    Target("gather", 0.35, "memory copy"),
    Target("gather", 20, "h5py fancy"),
    Target("kept", 100_000),
    Target("kept", 20, "DataLoader 0"),
    Target("kept", 20, "DataLoader 2"),
    Target("pack", 1.7, "pillow"),
)
SAID = {  # contestant -> what the table says of it
    "memory copy": "copy in memory",
    "gather": "pack of pixels: rows gathered",
    "h5py fancy": "h5py, fancy indexing",
    "kept": "pack of pixels, kept in memory",
    "partition": "pack of pixels, --shuffle partition",
    "global": "pack of pixels, --shuffle global",
    "blocks": "pack of pixels, --shuffle blocks",
    "kept augmented": "pack of pixels, kept, --flip --shift 4",
    "jpeg": "pack of JPEG files",
    "jpeg crop": "pack of JPEG files, --random-crop 0.08",
    "foreign": "HDF5 of others, one piece",
    "foreign gzip": "HDF5 of others, gzip chunks, blocks",
    "DataLoader 0": "DataLoader over h5py, 0 workers",
    "DataLoader 2": "DataLoader over h5py, 2 workers",
    "pillow": "Pillow, one thread, from files",
    "pack": "hpctrain pack, all cores, from files",
}
BYTES = ("memory copy", "gather", "h5py fancy")  # these give bytes, the others floats
FROM_FILES = ("pillow", "pack")


def run(config: BenchConfig, say: Callable[[object], None]) -> None:
    """Run all rounds and print the table."""
    for line in machine_lines():
        say(line)
    rates: Rates = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="hpctrain-bench-") as name:
        folder = Path(name)
        raw, jpeg = make_files(folder, config.data)
        say(
            f"{sum(s.rows for s in raw.splits.values()):,} images: {raw.file_size / 2**20:,.1f} MiB"
            f" of pixels, {jpeg.file_size / 2**20:,.1f} MiB as JPEG files"
        )
        for number in range(config.rounds):
            for who in SAID:
                rates[who].append(measure(who, folder))
                say(f"round {number + 1}  {SAID[who]}: {number_text(rates[who][-1])} images/s")
    say(table(rates))
    for line in target_lines(rates):
        say(line)


def make_files(folder: Path, source: str | None) -> tuple[Pack, Pack]:
    """All that readers.py reads; the two packs."""
    import h5py
    import numpy as np

    from hpctrain.bench.readers import SIDE
    from hpctrain.data.opened import open_split
    from hpctrain.data.pack import make_pack, write_pack
    from hpctrain.data.packed import read_pack

    write_images(folder / "files")
    images = source or str(folder / "files")
    settings = PackConfig(images, size=f"{SIDE}x{SIDE}", split="1", output=str(folder / "once.h5"))
    once = read_pack(make_pack(settings))
    settings = replace(settings, output=str(folder / "jpeg.h5"), encoding="jpeg")
    jpeg = read_pack(make_pack(settings))
    with open_split(once, "train") as rows:
        shape = (len(rows.labels), *once.image_shape)
        pixels = rows.gather(np.arange(shape[0]), np.empty(shape, np.uint8))
        pixels, labels = np.tile(pixels, (COPIES, 1, 1, 1)), np.tile(rows.labels, COPIES)
    write_pack(folder / "raw.h5", {"train": (pixels, labels)}, once.classes, {"source": "bench"})
    for name, chunks in (
        ("plain.h5", {}),
        ("gzip.h5", {"chunks": (CHUNK_ROWS, *once.image_shape), "compression": "gzip"}),
    ):
        with h5py.File(folder / name, "w") as file:
            file.create_dataset("images", data=pixels, **chunks)
            file.create_dataset("labels", data=labels)
    return read_pack(folder / "raw.h5"), jpeg


def write_images(folder: Path) -> None:
    """JPEG files that compress about as photographs do: smooth colours with some grain."""
    import numpy as np
    from PIL import Image

    random = np.random.default_rng(0)
    for number in range(FILES):
        place = folder / f"class{number % CLASSES}"
        place.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(random.integers(256, size=(24, 32, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize(FILE_SIDES, Image.Resampling.BICUBIC), np.float32)
        grain = random.normal(0, 6, smooth.shape)
        image = Image.fromarray((smooth + grain).clip(0, 255).astype(np.uint8))
        image.save(place / f"{number}.jpg", quality=90)


def measure(who: str, folder: Path) -> float:
    """images/s of one contestant."""
    if who == "pack":
        return pack_rate(folder)
    output = folder / "rate"
    program = [sys.executable, "-m", "hpctrain.bench.readers", who, str(folder), str(output)]
    run_job(program, SAID[who])
    return float(output.read_text())


def pack_rate(folder: Path) -> float:
    """images/s of packing, from the command to the finished file."""
    from hpctrain.bench.readers import SIDE

    words = ["pack", str(folder / "files"), "--size", f"{SIDE}x{SIDE}", "--overwrite"]
    program = [sys.executable, "-m", "hpctrain", *words, "--output", str(folder / "again.h5")]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    images, seconds = done.stderr.rpartition(" images in ")[::2]
    return int(images.split()[-1].replace(",", "")) / float(seconds.split()[0])


def ratio(rates: Rates, who: str, against: str) -> float:
    """Median over median."""
    return statistics.median(rates[who]) / statistics.median(rates[against])


def table(rates: Rates) -> Table:
    """All contestants: median, range, and ratios to their peers."""
    from rich.table import Table

    rounds = len(next(iter(rates.values())))
    made = Table(title=f"Images of 100x100x3 on one core, median of {rounds} round(s)")
    made.add_column("", no_wrap=True)
    peers = {"memory copy": "/ copy", "h5py fancy": "/ h5py", "DataLoader 2": "/ DataLoader"}
    for heading in ("images/s", "min - max", *peers.values()):
        made.add_column(heading, justify="right", no_wrap=True)
    for who, said in SAID.items():
        spread = f"{number_text(min(rates[who]))} - {number_text(max(rates[who]))}"
        cells = [said, number_text(statistics.median(rates[who])), spread]
        for peer in peers:
            fits = who != peer and who not in FROM_FILES and (who in BYTES) == (peer in BYTES)
            cells.append(f"{ratio(rates, who, peer):.2f}" if fits else "")
        made.add_row(*cells, end_section=who in ("h5py fancy", "foreign gzip", "DataLoader 2"))
    return made


def target_lines(rates: Rates) -> list[str]:
    """A line per target: what is wanted, what was reached."""
    lines = []
    for who, factor, against in TARGETS:
        found = ratio(rates, who, against) if against else statistics.median(rates[who])
        wanted = f"{number_text(factor)} {f'x {SAID[against]}' if against else 'images/s'}"
        verdict = "reached" if found >= factor else "MISSED "
        lines.append(f"{verdict} {number_text(found)}  {SAID[who]} >= {wanted}")
    if any(len(values) < 3 for values in rates.values()):
        lines.append("fewer than 3 rounds: nothing to quote")
    return lines
