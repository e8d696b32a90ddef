"""Runs by name, and what their records say of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from hpctrain.errors import UsageError
from hpctrain.files import open_regular
from hpctrain.report.fields import parse_record
from hpctrain.report.find import propose_run
from hpctrain.report.jsonlines import FILE_NAME, read_records

Record = dict[str, Any]


def find_run(target: str, runs_dir: str) -> Path:
    """The folder of a run, by its name or as it is. Raises UsageError."""
    for path in (Path(runs_dir) / target, Path(target)):
        if path.is_dir():
            return path
    proposal = propose_run(target, runs_dir)
    raise UsageError(f"there is no run {target!r} in {runs_dir} and no such folder{proposal}")


def evaluation_file(folder: Path, split: str) -> Path:
    """Where a run's folder keeps the figures of its network over a split, confusion matrix too."""
    return folder / f"evaluation-{split}.json"


class Scan(NamedTuple):
    """What a record tells, up to the first line that cannot be read."""

    last: int  # step; 0 for none
    wrong: str | None  # with that line
    launch: Record  # the last of kind "run"; empty where there is none
    gaps: list[range]  # steps that are missing before the last one
    ended: bool = False  # whether that launch recorded its end
    epochs: int = 0  # that were done
    validated: int = 0  # step of the last validation

    def missing(self, done: int) -> str:
        """The steps up to `done` that the record lacks: "5, 7 to 9"; empty where it has all."""
        gaps = [*self.gaps, range(self.last + 1, done + 1)]
        found = [range(gap.start, min(gap.stop, done + 1)) for gap in gaps]
        texts = [f"{g[0]:,} to {g[-1]:,}" if len(g) > 1 else f"{g[0]:,}" for g in found if g]
        return ", ".join(texts[:3]) + (f" and {len(texts) - 3} more gaps" if texts[3:] else "")


def last_step(folder: Path) -> int:
    """The last step of which a run's record tells, as far as it can be read; 0 for none."""
    return scan_record(folder).last


def scan_record(folder: Path) -> Scan:
    """Read the record of a run."""
    last, launch, gaps, ended, wrong = 0, Record(), [], False, None
    epochs = validated = 0
    try:
        for record in read_records(folder):
            if record["kind"] == "step":
                if record["step"] > last + 1:
                    gaps.append(range(last + 1, record["step"]))
                last = max(last, record["step"])
            elif record["kind"] == "run":
                launch, ended = record, False
            elif record["kind"] == "epoch":
                epochs = max(epochs, record["epoch"])
            elif record["kind"] == "evaluation" and record["split"] == "validation":
                validated = max(validated, record["step"])
            elif record["kind"] == "end":
                ended = True
    except UsageError as error:
        wrong = str(error)
    return Scan(last, wrong, launch, gaps, ended, epochs, validated)


def is_finished(folder: Path) -> bool:
    """Whether the last launch of a run came to its end by itself."""
    try:
        with open(folder / FILE_NAME, "rb", opener=open_regular) as file:
            lines = file.read().splitlines()
        return bool(lines) and parse_record(lines[-1]).get("status") == "done"
    except (OSError, ValueError):
        return False
