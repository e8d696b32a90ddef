"""Records and what else `watch`, `plot` and `compare` read of a run, beside one that is sound."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from scripts.fuzzing.runs import mutate_file
from scripts.fuzzing.surface import OTHER, WRONG, Outcome, Surface, attempt, run_command
from scripts.fuzzing.training import leave_heartbeat, make_pack, run_settings, train

READ = ("progress.jsonl", "progress.jsonl", "ranks/0.json", "config.toml", "plan.json")
READ += ("evaluation-test.json", "model.safetensors")


class Records(Surface):
    """What is shown of the mutated run may be anything; the sound one is shown as before."""

    name, weight = "records", 2.0

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        make_pack(folder / "pack.h5")
        for name in ("sound", "mutated"):
            shutil.rmtree(folder / name, ignore_errors=True)
        train(run_settings(folder, run="sound"))
        leave_heartbeat(folder / "sound")
        shutil.copytree(folder / "sound", folder / "mutated")
        self.line = self.watch()[1]

    def control(self) -> list[str]:
        found = [self.use(name) for name in ("watch", "plot", "confusion", "compare")]
        return [outcome.text for outcome in found if outcome.kind != OTHER]

    def trial(self, draw: random.Random) -> tuple[str, Outcome]:
        name = draw.choices(("watch", "plot", "confusion", "compare"), (8, 1, 1, 4))[0]
        path = self.folder / "mutated" / draw.choice(READ)
        sound = self.folder / "sound" / path.relative_to(self.folder / "mutated")
        data, what = mutate_file(sound, draw)
        path.write_bytes(data)
        try:
            return f"{name}, {path.name}, {what}", self.use(name)
        finally:
            shutil.copyfile(sound, path)

    def use(self, name: str) -> Outcome:
        """What one of the subcommands does."""
        runs = ["sound", "mutated", "--runs-dir", str(self.folder)]
        figure = ["--output", str(self.folder / "figure.png")]
        words = {
            "plot": ["plot", *runs, *figure],
            "confusion": ["plot", *runs, "--confusion", *figure],
            "compare": ["compare", *runs],
        }
        action = self.watch if name == "watch" else lambda: run_command(*words[name])
        found = attempt(action, "mutated")
        if isinstance(found, Outcome):
            return Outcome(WRONG, f"refused: {found.text}") if name == "watch" else found
        if name == "watch" and found != (0, self.line):
            return Outcome(WRONG, f"the sound run is shown as {found}")
        return Outcome(OTHER)

    def watch(self) -> tuple[int, str]:
        """Exit code, and the line of the sound run."""
        code, printed = run_command("watch", "sound", "mutated", "--once", *self.runs())
        return code, next(line for line in printed.splitlines() if "sound" in line)

    def runs(self) -> list[str]:
        """Where the runs are."""
        return ["--runs-dir", str(self.folder)]
