"""``python -m scripts.bench pack``: the time to pack files, by hpctrain and by hand.

Each contestant has two processes that decode, and is timed from its start to its end, with all
imports, in seconds and in CPU seconds of all its processes. By hand, TIFF files are read by
tifffile and JPEG files by Pillow, and h5py writes them (by_hand.py). With --against COMMIT, an
earlier package packs JPEG and PNG files instead.
"""

from __future__ import annotations

import resource
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from hpctrain import launch
from scripts.bench.by_hand import PROCESSES
from scripts.bench.harness import Rates, measure, print_table, python, run_job
from scripts.bench.reading import CLASSES, write_images

PACK = "hpctrain pack"
TIFF_FILES = 1000
TIFF_SIDES = (256, 512)
PHOTOGRAPHS = 2000
PHOTOGRAPH_SIDE = 100  # to which they are resized
ICONS = 20_000
ICON_SIDE = 40
PACKED_ICON_SIDE = 32


class Source(NamedTuple):
    """Files to pack: what writes them into a folder, and to what side they are resized, or 0."""

    write: Callable[[Path], None]
    side: int
    peer: str = ""  # what packs them by hand

    def pack_words(self) -> list[str]:
        """Return the arguments of ``hpctrain pack`` that make a pack of files/."""
        words = ["pack", "files", "--output", "pack.h5", "--jobs", str(PROCESSES), "--overwrite"]
        if self.side:
            words += ["--size", f"{self.side}x{self.side}", "--channels", "3"]
        return words

    def hand_words(self) -> list[str]:
        """Return the arguments of by_hand.py."""
        return ["files", "by_hand.h5", *[str(self.side)] * bool(self.side)]


class Job(NamedTuple):
    """A contestant: its command, and the folder of the package that it imports."""

    command: list[str]
    tree: Path = launch.ROOT


def write_tiffs(folder: Path, count: int, side: int) -> None:
    """Write TIFF files of 16-bit gray without compression: a slope with some noise."""
    random = np.random.default_rng(0)
    slope = 20 * np.add.outer(np.arange(side), np.arange(side))
    for number in range(count):
        values = (slope + random.integers(0, 2000, slope.shape)).astype(np.uint16)
        Image.fromarray(values).save(path_of(folder, number, "tif"))


def write_icons(folder: Path, count: int) -> None:
    """Write small PNG files in colour."""
    random = np.random.default_rng(0)
    for number in range(count):
        coarse = Image.fromarray(random.integers(256, size=(4, 4, 3), dtype=np.uint8))
        icon = coarse.resize((ICON_SIDE, ICON_SIDE), Image.Resampling.BICUBIC)
        icon.save(path_of(folder, number, "png"), compress_level=1)


def path_of(folder: Path, number: int, suffix: str) -> Path:
    """Return the path of a file in the folder of its class, which is made if needed."""
    of_class = folder / f"class{number % CLASSES}"
    of_class.mkdir(parents=True, exist_ok=True)
    return of_class / f"{number}.{suffix}"


def tiffs(side: int) -> Source:
    """Return TIFF files of this side."""
    return Source(partial(write_tiffs, count=TIFF_FILES, side=side), 0, "tifffile + h5py")


def photographs() -> Source:
    """Return JPEG files."""
    return Source(partial(write_images, count=PHOTOGRAPHS), PHOTOGRAPH_SIDE, "Pillow + h5py")


def icons() -> Source:
    """Return PNG files."""
    return Source(partial(write_icons, count=ICONS), PACKED_ICON_SIDE)


def measure_packing(options: Namespace, folder: Path) -> None:
    """Measure hpctrain and the program by hand on all their sources; print the tables."""
    sources = {f"{TIFF_FILES:,} TIFF files of 16 bits, {s}x{s}": tiffs(s) for s in TIFF_SIDES}
    sources[photographs_title()] = photographs()
    for number, (title, source) in enumerate(sources.items()):
        work = folder / str(number)
        source.write(work / "files")
        peer = f"{source.peer}, {PROCESSES} processes"
        jobs = {
            PACK: Job(python("hpctrain", *source.pack_words())),
            peer: Job(python("scripts.bench.by_hand", *source.hand_words())),
        }
        compare_jobs(title, jobs, options.rounds, work, {PACK: {"/ by hand": peer}})


def compare_packing(options: Namespace, folder: Path, trees: Mapping[str, Path]) -> None:
    """Measure packages, given by name with their folders, on JPEG and PNG files."""
    side = f"{PACKED_ICON_SIDE}x{PACKED_ICON_SIDE}"
    sources = {
        photographs_title(): photographs(),
        f"{ICONS:,} PNG files of {ICON_SIDE}x{ICON_SIDE}, to {side}": icons(),
    }
    new, old = trees
    for number, (title, source) in enumerate(sources.items()):
        work = folder / str(number)
        source.write(work / "files")
        command = python("hpctrain", *source.pack_words())
        jobs = {name: Job(command, tree) for name, tree in trees.items()}
        compare_jobs(title, jobs, options.rounds, work, {new: {"new / old": old}})


def photographs_title() -> str:
    """Return the title of the table of JPEG files."""
    return f"{PHOTOGRAPHS:,} JPEG files, to {PHOTOGRAPH_SIDE}x{PHOTOGRAPH_SIDE}"


def compare_jobs(
    title: str,
    jobs: Mapping[str, Job],
    rounds: int,
    folder: Path,
    compared: Mapping[str, Mapping[str, str]],
) -> dict[str, Rates]:
    """Run jobs in turn in `folder`; print and return their seconds and CPU seconds by unit."""
    figures: dict[str, Rates] = {unit: {name: [] for name in jobs} for unit in ("s", "CPU s")}

    def run(name: str) -> float:
        job = jobs[name]
        before = cpu_seconds()
        began = time.perf_counter()
        env = launch.environment({"OMP_NUM_THREADS": "1", "PYTHONPATH": str(job.tree)})
        run_job(job.command, f"{name}: {title}", env, folder)
        seconds = time.perf_counter() - began
        figures["s"][name].append(seconds)
        figures["CPU s"][name].append(cpu_seconds() - before)
        return seconds

    measure(jobs, rounds, run)
    for unit, rates in figures.items():
        print_table(title, rates, compared, unit)
    return figures


def cpu_seconds() -> float:
    """Return the CPU seconds of all processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
