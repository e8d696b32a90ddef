"""Run folders: one file of them is mutated, then the run is taken up again."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

from hpctrain.report.record import read_records
from hpctrain.training.checkpoint import _check
from scripts.fuzzing.mutations import (
    mutate_bytes,
    mutate_json,
    mutate_lines,
    mutate_tensors,
    mutate_toml,
)
from scripts.fuzzing.surface import Outcome, Surface, attempt, compared
from scripts.fuzzing.training import leave_heartbeat, make_pack, run_settings, train
from tests.training.runs import leave_after

LEFT_AFTER = 7  # steps of ten


def make_unfinished(folder: Path, name: str) -> None:
    """A run that was asked to leave in its second epoch."""
    with leave_after(LEFT_AFTER):
        code = train(run_settings(folder, run=name))
    if code != 75:
        raise SystemExit(f"the unfinished run ended with {code}")


class Runs(Surface):
    """A run that left in mid-epoch, and one that is done and gets another epoch: the weights at the
    end are those of runs that nothing befell, or a line says what is wrong."""

    name, weight = "runs", 3.0

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        make_pack(folder / "pack.h5")
        for path in folder.glob("*/"):
            shutil.rmtree(path)
        make_unfinished(folder, "unfinished")
        train(run_settings(folder, run="finished", epochs=1))
        for name in ("unfinished", "finished"):
            leave_heartbeat(folder / name)
        train(run_settings(folder, run="whole"))
        self.sound = str(list(read_records(folder / "whole"))[-1]["digest"])

    def control(self) -> list[str]:
        found = {
            name: attempt(lambda n=name: self.resume(n)) for name in ("unfinished", "finished")
        }
        return [f"{name}: {digest}" for name, digest in found.items() if digest != self.sound]

    def resume(self, name: str, path: str = "", data: bytes = b"") -> str:
        """Copy the run, put `data` into its file `path`, and let it go on: its last digest."""
        target = self.copy(name, path, data)
        code = train(run_settings(self.folder, run="mutated"))
        end = list(read_records(target))[-1]
        return str(end.get("digest")) if code == 0 else f"exit code {code}"

    def copy(self, name: str, path: str, data: bytes) -> Path:
        """A copy of a run, with `data` in its file `path`."""
        target = self.folder / "mutated"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(self.folder / name, target)
        if path:
            (target / path).write_bytes(data)
        return target

    def trial(self, draw: random.Random) -> tuple[str, Outcome]:
        name = draw.choice(("unfinished", "unfinished", "finished"))
        run = self.folder / name
        files = sorted(p for p in run.rglob("*") if p.is_file() and p.name != "lock")
        path = draw.choice(files)
        data, what = mutate_file(path, draw)
        relative = str(path.relative_to(run))
        sealed = None
        if path.parent.name == "checkpoints" and draw.random() < 0.9:
            sealed = sealed_again(data)
        found = attempt(lambda: self.resume(name, relative, sealed or data), "mutated")
        # With a checksum of its own, what it says of figures is believed.
        how = ", sealed again" if sealed else ""
        return f"{name}, {relative}, {what}{how}", compared(found, self.sound, sealed is not None)


def sealed_again(data: bytes) -> bytes | None:
    """The JSON of a checkpoint with a checksum that is right; None where it is no such JSON."""
    try:
        known = json.loads(data)
        known.pop("check")
        return json.dumps({**known, "check": _check(known)}).encode()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def mutate_file(path: Path, draw: random.Random) -> tuple[bytes, str]:
    """The content of a file of a run, changed in a way that suits it; what was done."""
    data = path.read_bytes()
    mutate = {
        ".json": mutate_json,
        ".jsonl": mutate_lines,
        ".toml": mutate_toml,
        ".safetensors": mutate_tensors,
    }.get(path.suffix)
    if mutate and data:
        return mutate(data, draw)
    changed = bytearray(data)
    return changed, mutate_bytes(changed, draw)
