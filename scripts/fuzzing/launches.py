"""Jobs of two ranks under mpirun on mutated inputs: refused by one line, or the sound result."""

from __future__ import annotations

import random
import subprocess
import sys

from hpctrain.report.record import read_records
from scripts.fuzzing.runs import Runs, mutate_file
from scripts.fuzzing.surface import EQUAL, REFUSED, WRONG, Outcome
from scripts.fuzzing.training import run_settings
from tests.launch import Job, mpirun

LIMIT = 60.0  # seconds


class Launches(Runs):
    """Run folders as in `runs`, resumed by `mpirun -n 2 python -m hpctrain`."""

    name, weight = "launches", 0.0  # their number is asked for

    def control(self) -> list[str]:
        found = self.launch("unfinished", "", b"")
        return [] if found.kind == EQUAL else [found.text]

    def trial(self, draw: random.Random) -> tuple[str, Outcome]:
        run = self.folder / "unfinished"
        files = sorted(p for p in run.rglob("*") if p.is_file() and p.name != "lock")
        path = draw.choice(files)
        data, what = mutate_file(path, draw)
        relative = str(path.relative_to(run))
        return f"{relative}, {what}", self.launch("unfinished", relative, data)

    def launch(self, name: str, path: str, data: bytes) -> Outcome:
        """Copy the run, put `data` into a file of it, and launch two ranks that take it up."""
        target = self.copy(name, path, data)
        config = run_settings(self.folder, run="mutated")
        toml = self.folder / "settings.toml"
        from hpctrain.config import to_toml

        toml.write_text(to_toml(config))
        words = [sys.executable, "-m", "hpctrain", "--config", str(toml)]
        job = Job([mpirun(), "-n", "2", *words], cwd=self.folder)
        try:
            _, errors = job.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            job.end()
            return Outcome(WRONG, f"no end after {LIMIT:.0f} s")
        said = [line for line in errors.splitlines() if line.startswith("hpctrain: ")]
        if "Traceback" in errors or job.returncode not in (0, 1, 2):
            return Outcome(WRONG, f"exit code {job.returncode}: {errors[-500:]}")
        if job.returncode:
            named = len(said) == 1 and "mutated" in said[0]
            return Outcome(REFUSED if named else WRONG, f"{said or errors[-500:]}")
        digest = str(list(read_records(target))[-1].get("digest"))
        return Outcome(EQUAL if digest == self.sound else WRONG, f"another digest {digest}")
