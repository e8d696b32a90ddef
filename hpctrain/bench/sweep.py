"""``hpctrain bench sweep``: networks side by side against the same ones one after another.

    python -m hpctrain bench sweep

Six networks of the digits, one epoch each, one rank of one thread: in two slots, and in one, in
turn. Timed is the whole command, with the start of every network.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from hpctrain.bench.jobs import run_job
from hpctrain.bench.report import machine_lines
from hpctrain.config import BenchConfig

NETWORKS, SLOTS, EPOCHS = 6, 2, 3
TARGET = 0.6
FILE = """\
[base]
data = {data}
epochs = {epochs}
threads = 1
device = "cpu"
[grid]
seed = {seeds}
"""


def run(config: BenchConfig, say: Callable[[object], None]) -> None:
    """Run all rounds and print the ratio."""
    from hpctrain.data.builtin import locate

    pack = str(locate(config.data or "digits", config.data_dir))
    for line in machine_lines():
        say(line)
    seconds: dict[int, list[float]] = {SLOTS: [], 1: []}
    with tempfile.TemporaryDirectory(prefix="hpctrain-bench-") as folder:
        file = Path(folder) / "sweep.toml"
        seeds = list(range(NETWORKS))
        file.write_text(FILE.format(data=json.dumps(pack), epochs=EPOCHS, seeds=seeds))
        for number in range(config.rounds):
            for slots, found in seconds.items():
                found.append(sweep(file, slots, f"{number}-{slots}"))
                say(f"round {number + 1}  {slots} slot(s): {found[-1]:.1f} s")
    for line in lines(seconds):
        say(line)


def sweep(file: Path, slots: int, name: str) -> float:
    """Seconds of one sweep."""
    words = ["sweep", str(file), "--slots", str(slots), "--name", name, "--progress", "none"]
    began = time.perf_counter()
    program = [sys.executable, "-m", "hpctrain", *words, "--runs-dir", str(file.parent)]
    run_job(program, f"the sweep in {slots} slot(s)")
    return time.perf_counter() - began


def lines(seconds: dict[int, list[float]]) -> list[str]:
    """The medians, and whether the target was reached."""
    together, alone = (statistics.median(seconds[slots]) for slots in (SLOTS, 1))
    ratio = together / alone
    verdict = "reached" if ratio <= TARGET else "MISSED "
    return [
        f"{NETWORKS} networks of {EPOCHS} epochs, median of {len(seconds[1])} round(s)",
        f"  {SLOTS} slots{together:>8.1f} s",
        f"  1 slot {alone:>8.1f} s",
        f"{verdict} {ratio:.3f}  of the time one after another, in {SLOTS} slots <= {TARGET}",
    ]
