"""Weight files: evaluated, asked for predictions, trained on, compared."""

from __future__ import annotations

import csv
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpctrain.report.record import read_records
from scripts.fuzzing.mutations import mutate_tensors
from scripts.fuzzing.surface import Outcome, Surface, attempt, compared, run_command
from scripts.fuzzing.training import make_pack, run_settings, train

FILE = "model.safetensors"


class Weights(Surface):
    """model.safetensors of a run: what evaluate, predict, --init and compare make of it."""

    name, weight = "weights", 2.0

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        make_pack(folder / "pack.h5")
        for name in ("sound", "mutated"):
            shutil.rmtree(folder / name, ignore_errors=True)
        train(run_settings(folder, run="sound"))
        shutil.copytree(folder / "sound", folder / "mutated")
        self.data = (folder / "sound" / FILE).read_bytes()
        uses = (self.evaluate, self.predict, self.init, self.compare)
        self.uses: dict[str, Callable[[], Any]] = {use.__name__: use for use in uses}
        self.sound = {name: attempt(use) for name, use in self.uses.items()}

    def control(self) -> list[str]:
        return [
            f"{name}: {found}"
            for name, use in self.uses.items()
            if isinstance(found := attempt(use), Outcome) or found != self.sound[name]
        ]

    def trial(self, draw: random.Random) -> tuple[str, Outcome]:
        name = draw.choices(list(self.uses), (4, 4, 1, 4))[0]
        data, what = mutate_tensors(self.data, draw)
        (self.folder / "mutated" / FILE).write_bytes(data)
        found = attempt(self.uses[name], FILE, str(self.folder / "mutated"))
        if found == (1, "different"):  # compare says so aloud
            found = self.sound[name]
        return f"{name}, {what}", compared(found, self.sound[name])

    def evaluate(self) -> dict[str, Any]:
        """The figures of the test."""
        output = self.folder / "figures.json"
        words = ["--runs-dir", str(self.folder), "--output", str(output)]
        run_command("evaluate", "mutated", *words)
        figures = json.loads(output.read_text())
        return {
            name: figures[name] for name in ("rows", "loss", "accuracy", "confusion", "classes")
        }

    def predict(self) -> list[list[str]]:
        """The lines of all rows of the test."""
        output = self.folder / "answers.csv"
        words = ["--runs-dir", str(self.folder), "--output", str(output)]
        run_command("predict", "mutated", *words)
        return list(csv.reader(output.open()))

    def init(self) -> str:
        """The digest of a run that begins with these weights."""
        shutil.rmtree(self.folder / "next", ignore_errors=True)
        init = str(self.folder / "mutated" / FILE)
        train(run_settings(self.folder, run="next", init=init, epochs=1, checkpoint_every="9"))
        return str(list(read_records(self.folder / "next"))[-1]["digest"])

    def compare(self) -> tuple[int, str]:
        """Exit code, and the last word."""
        code, printed = run_command("compare", "sound", "mutated", "--runs-dir", str(self.folder))
        return code, printed.split()[-1]
