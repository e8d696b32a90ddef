"""Surfaces of runs: run folders (also resumed on two ranks), weights, records and settings."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hpctrain.cli import parse
from hpctrain.config import Config, PackConfig, to_toml
from hpctrain.errors import Failure
from hpctrain.sweep.file import read_sweep
from scripts.fuzzing.inputs import last_digest, leave_heartbeat, make_pack, run_settings, train
from scripts.fuzzing.surface import REFUSED, WRONG, Case, Outcome, Surface, run_command
from tests.support.launch import Job, mpirun
from tests.support.leaving import leave_after

LEFT_AFTER = 7  # of ten steps
LAUNCH_LIMIT = 60.0  # seconds
READ = ("progress.jsonl", "progress.jsonl", "ranks/0.json", "config.toml", "plan.json")
READ += ("evaluation-test.json", "model.safetensors")
SWEEP = """
[base]
data = "digits"
epochs = 3
[grid]
optimizer = ["sgdm", "adam"]
lr = [0.01, 0.001]
[[variant]]
name = "wide"
model = "mynets:wide"
batch_size = 64
"""
PREDICT = 'run = "first"\nimages = ["a", "b"]\noutput = "-"\nbatch_size = 7\n'


class Runs(Surface):
    """A run preempted in mid-epoch, and a finished run that is resumed for another epoch.

    The weights at the end equal those of an undisturbed run, or an error of one line is printed.
    """

    name, weight = "runs", 3.0
    parts = (("unfinished", 2.0), ("finished", 1.0))  # relative numbers of trials

    def make_cases(self) -> Sequence[Case]:
        make_pack(self.folder / "pack.h5")
        with leave_after(LEFT_AFTER):
            code = train(run_settings(self.folder, run="unfinished"))
        if code != 75:
            raise SystemExit(f"the unfinished run ended with {code}")
        train(run_settings(self.folder, run="finished", epochs=1))
        train(run_settings(self.folder, run="whole"))
        sound, cases = last_digest(self.folder / "whole"), []
        for name, part in self.parts:
            run = self.folder / name
            leave_heartbeat(run)
            files = sorted(p for p in run.rglob("*") if p.is_file() and p.name != "lock")
            for path in files:
                target = self.folder / "input"
                use = partial(self.resume, name, path.relative_to(run))
                what, weight = str(path.relative_to(self.folder)), part / len(files)
                cases.append(Case(what, path, target, use, sound, ("mutated",), False, weight))
        return cases

    def controls(self) -> Sequence[Case]:
        return [next(c for c in self.cases if c.what.startswith(name)) for name, _ in self.parts]

    def resume(self, name: str, path: Path) -> Outcome | str:
        """Copy the run, replace its file `path` by the input, resume it; return its last digest."""
        run = self.folder / "mutated"
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(self.folder / name, run)
        shutil.copyfile(self.folder / "input", run / path)
        return self.go_on(run_settings(self.folder, run="mutated")) or last_digest(run)

    def go_on(self, config: Config) -> Outcome | None:
        """Train; return the outcome if the run does not finish, else None."""
        code = train(config)
        return Outcome(WRONG, f"exit code {code}") if code else None


class Launches(Runs):
    """Run folders as in `runs`, resumed by `mpirun -n 2 python -m hpctrain`."""

    name, weight = "launches", 0.0  # their number is an option
    parts = (("unfinished", 1.0),)

    def go_on(self, config: Config) -> Outcome | None:
        toml = self.folder / "settings.toml"
        toml.write_text(to_toml(config.table()))
        words = [sys.executable, "-m", "hpctrain", "--config", str(toml)]
        job = Job([mpirun(), "-n", "2", *words], cwd=self.folder)
        try:
            _, errors = job.communicate(timeout=LAUNCH_LIMIT)
        except subprocess.TimeoutExpired:
            job.end()
            return Outcome(WRONG, f"no end after {LAUNCH_LIMIT:.0f} s")
        if "Traceback" in errors or job.returncode not in (0, 1, 2):
            return Outcome(WRONG, f"exit code {job.returncode}: {errors[-500:]}")
        if not job.returncode:
            return None
        said = [line for line in errors.splitlines() if line.startswith("hpctrain: ")]
        named = len(said) == 1 and "mutated" in said[0]
        return Outcome(REFUSED if named else WRONG, f"{said or errors[-500:]}")


class Weights(Surface):
    """model.safetensors of a run, read by evaluate, predict, --init and compare."""

    name, weight = "weights", 2.0

    def make_cases(self) -> Sequence[Case]:
        make_pack(self.folder / "pack.h5")
        train(run_settings(self.folder, run="sound"))
        shutil.copytree(self.folder / "sound", self.folder / "mutated")
        self.where = ["--runs-dir", str(self.folder)]
        sound, target = (self.folder / n / "model.safetensors" for n in ("sound", "mutated"))
        uses: list[tuple[Callable[[], Any], float]] = [(self.evaluate, 4.0), (self.predict, 4.0)]
        uses += [(self.init, 1.0), (self.compare, 4.0)]
        names = (target.name, str(target.parent))
        return [
            Case(use.__name__, sound, target, use, use(), names, False, weight)
            for use, weight in uses
        ]

    def attempt(self, case: Case, data: bytes) -> Outcome | Any:
        found = super().attempt(case, data)
        return case.expected if found == (1, "different") else found  # compare reported it

    def evaluate(self) -> dict[str, Any]:
        """Return the figures of the test split."""
        output = self.folder / "figures.json"
        run_command("evaluate", "mutated", *self.where, "--output", str(output))
        figures = json.loads(output.read_text())
        return {
            name: figures[name] for name in ("rows", "loss", "accuracy", "confusion", "classes")
        }

    def predict(self) -> list[list[str]]:
        """Return the lines of all samples of the test split."""
        output = self.folder / "answers.csv"
        run_command("predict", "mutated", *self.where, "--output", str(output))
        return list(csv.reader(output.open()))

    def init(self) -> str:
        """Return the digest of a run that starts from these weights."""
        shutil.rmtree(self.folder / "next", ignore_errors=True)
        init = str(self.folder / "mutated/model.safetensors")
        train(run_settings(self.folder, run="next", init=init, epochs=1, checkpoint_every="9steps"))
        return last_digest(self.folder / "next")

    def compare(self) -> tuple[int, str]:
        """Return the exit code and the last word printed."""
        code, printed = run_command("compare", "sound", "mutated", *self.where)
        return code, printed.split()[-1]


class Records(Surface):
    """Records and other files of a run that `watch`, `plot` and `compare` read, beside a sound run.

    Anything may be shown for the mutated run; `watch` must show the sound run unchanged.
    """

    name, weight = "records", 2.0

    def make_cases(self) -> Sequence[Case]:
        make_pack(self.folder / "pack.h5")
        sound, mutated = self.folder / "sound", self.folder / "mutated"
        train(run_settings(self.folder, run="sound"))
        leave_heartbeat(sound)
        shutil.copytree(sound, mutated)
        runs = ["sound", "mutated", "--runs-dir", str(self.folder)]
        figure = ["--output", str(self.folder / "figure.png")]
        uses: dict[str, tuple[Callable[[], Any], float]] = {
            "watch": (partial(self.watch, runs), 8.0),
            "plot": (partial(self.show, "plot", *runs, *figure), 1.0),
            "confusion": (partial(self.show, "plot", *runs, *figure, "--confusion"), 1.0),
            "compare": (partial(self.show, "compare", *runs), 4.0),
        }
        return [
            Case(
                f"{name}, {file}", sound / file, mutated / file, use, use(), ("mutated",), False, w
            )
            for name, (use, w) in uses.items()
            for file in READ
        ]

    def controls(self) -> Sequence[Case]:
        return self.cases[:: len(READ)]

    def watch(self, runs: list[str]) -> tuple[int, str]:
        """Return the exit code and the line of the sound run; no error is allowed."""
        try:
            code, printed = run_command("watch", *runs, "--once")
        except Failure as error:
            raise AssertionError(f"refused: {error}") from error
        return code, next(line for line in printed.splitlines() if "sound" in line)

    def show(self, *words: str) -> None:
        """Run a command and ignore its output."""
        run_command(*words)


class Settings(Surface):
    """TOML files: --config of subcommands, and the files of sweeps.

    The settings are read; those of train are resolved to a plan. Mutations that are valid settings
    are accepted.
    """

    name = "settings"

    def make_cases(self) -> Sequence[Case]:
        make_pack(self.folder / "pack.h5")
        texts = {
            "train": to_toml(run_settings(self.folder, epochs=1).table()),
            "pack": to_toml(PackConfig("images", size="9x7", output="x.h5").table()),
            "predict": PREDICT,
            "sweep": SWEEP.strip(),
        }
        cases = []
        for name, text in texts.items():
            path = self.folder / f"{name}.toml"
            path.write_text(text)
            # The error for a value out of range names its flag, even if a file gave the value;
            # the error for another path names that path.
            names = (path.name, "--", "mini-batch", str(self.folder), "/etc/passwd")
            cases.append(Case(name, path, path, partial(self.read, name, path), None, names))
        return cases

    def read(self, name: str, path: Path) -> None:
        """Read the settings."""
        if name == "sweep":
            read_sweep(path)
        elif isinstance(parse([name, "--config", str(path)])[1], Config):
            run_command("train", "--config", str(path), "--dry-run", "--run", "never")
