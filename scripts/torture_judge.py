"""How scripts/torture corrupts runs, and the checks of completed runs."""

from __future__ import annotations

import os
import random
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hpctrain.compare import first_difference
from hpctrain.report.record import read_records

INTERVAL = 3  # steps between checkpoints
STEPS = 28  # of a run


class Seconds(NamedTuple):
    """The cost of a fault; None if unknown."""

    to_end: float | None  # from the fault to the end of the job
    to_step: float | None  # from the next launch to its first step


def corrupt(run: Path, fault: str, draw: random.Random) -> bytes:
    """Corrupt the folder after the kill; return the original plan.json if that was changed."""
    plan = run / "plan.json"
    if fault.endswith("flipped bit"):
        files = sorted((run / "checkpoints").glob("*.safetensors"))
        if files:
            flip(files[-1], draw)
    elif fault.endswith("torn record"):
        cut_record(run, draw, lines=0)
    elif fault.endswith("cut record"):
        cut_record(run, draw, lines=draw.randint(1, STEPS))
    elif fault.endswith("flipped plan") and plan.exists():
        whole = plan.read_bytes()
        flip(plan, draw)
        return whole
    return b""


def flip(path: Path, draw: random.Random) -> None:
    """Flip a bit of a file."""
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(bytes(content))


def cut_record(run: Path, draw: random.Random, lines: int) -> None:
    """Remove `lines` lines from the end of the record, as after a power failure, but not the first.

    With 0, cut within the last line, as a killed writer may leave it.
    """
    path = run / "progress.jsonl"
    found = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    if lines:
        path.write_bytes(b"".join(found[:1] + found[1:-lines])) if found else None
    elif found:
        os.truncate(path, path.stat().st_size - draw.randint(1, len(found[-1]) - 1))


def left_over(folder: Path, name: str) -> list[str]:
    """Return a line for each temporary file that killed writers left in the run or beside it."""
    found = [*(folder / name).rglob(".*"), *folder.glob(".*")]
    return [f"left over: {path.relative_to(folder)}" for path in found]


def judge(run: Path, before: int, whole: str, fault: str) -> list[str]:
    """Return the problems of a run that was broken, resumed and completed."""
    problems = []
    records = list(read_records(run))
    if records[-1].get("digest") != whole:
        problems.append(f"digest {str(records[-1].get('digest'))[:12]} is not {whole[:12]}")
    numbers = [r["step"] for r in records if r["kind"] == "step"]
    notes = [r["text"] for r in records if r["kind"] == "note"]
    missing = [step for step in range(1, STEPS + 1) if step not in numbers]
    lost = fault.endswith("cut record") or (fault.endswith("torn record") and len(missing) == 1)
    if missing and lost:  # a checkpoint is newer than the record: a note must name the steps
        ends = {str(missing[0]), str(missing[-1])}
        if not any(ends <= set(re.findall(r"\d+", text)) for text in notes):
            problems.append(f"missing steps {missing} are not named in {notes}")
    elif numbers != list(range(1, STEPS + 1)):
        problems.append(f"record of steps {numbers}")
    elif lost and any("has lost the last epoch or validation" in text for text in notes):
        pass
    elif (
        apart := first_difference(records, list(read_records(run.with_name("whole"))))
    ) is not None:
        problems.append(f"record differs from the unbroken one: {apart}")
    resumed = [int(text.split()[-1]) for text in notes if text.startswith("going on after step")]
    # While a checkpoint is written, training continues until the next one is due. If that write
    # failed, the previous checkpoint is used; if that one is corrupt, the one before it.
    most = INTERVAL * (3 if fault.endswith("flipped bit") else 2)
    first = resumed[0] if resumed else 0
    if before - first > most and not fault.endswith("cut record"):
        problems.append(f"lost {before - first} steps, {most} at most may be")
    return problems


def print_table(cells: Counter, faults: Sequence[str], phases: Sequence[str]) -> None:
    """Print the number of trials by fault and phase."""
    width = max(map(len, faults))
    print(f"{'':{width}}  " + "  ".join(f"{phase:>10}" for phase in phases))
    for fault in faults:
        counts = "  ".join(f"{cells[fault, phase]:>10}" for phase in phases)
        print(f"{fault:{width}}  {counts}")


def print_seconds(spent: dict[str, list[Seconds]]) -> None:
    """Print the cost of faults, median and maximum, by fault."""
    print("\nseconds, median (most) of n: from the fault to the end of the job, and from the next")
    print("launch to its first step")
    width = max(map(len, spent))
    for fault, found in spent.items():
        columns = []
        for values in zip(*found, strict=True):
            known = [value for value in values if value is not None]
            if known:
                middle, most = statistics.median(known), max(known)
                columns.append(f"{middle:6.1f} ({most:4.1f}) of {len(known):2}")
        print(f"{fault:{width}}  " + "   ".join(columns))
