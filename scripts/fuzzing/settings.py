"""TOML: --config of all subcommands, and the files of sweeps."""

from __future__ import annotations

import random
from pathlib import Path

from hpctrain.cli import parse
from hpctrain.config import Config, PackConfig, to_toml
from hpctrain.sweep.file import read_sweep
from scripts.fuzzing.mutations import mutate_toml
from scripts.fuzzing.surface import OTHER, Outcome, Surface, attempt, run_command
from scripts.fuzzing.training import make_pack, run_settings

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
PREDICT = 'run = "first"\nimages = ["a", "b"]\noutput = "-"\nbatch = 7\n'


class Settings(Surface):
    """Settings are read, and a plan is made of them where they are those of train."""

    name = "settings"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.pack = make_pack(folder / "pack.h5")
        self.files = {
            "train": to_toml(run_settings(folder, epochs=1)),
            "pack": to_toml(PackConfig("images", size="9x7", output="x.h5")),
            "predict": PREDICT,
            "sweep": SWEEP,
        }

    def control(self) -> list[str]:
        found = {name: self.read(name, text.encode()) for name, text in self.files.items()}
        return [f"{name}: {each.text}" for name, each in found.items() if each.kind != OTHER]

    def trial(self, draw: random.Random) -> tuple[str, Outcome]:
        name = draw.choice(list(self.files))
        data, what = mutate_toml(self.files[name].strip().encode(), draw)
        return f"{name}, {what}", self.read(name, data)

    def read(self, name: str, data: bytes) -> Outcome:
        """What becomes of settings; other ones are settings too."""
        path = self.folder / f"{name}.toml"
        path.write_bytes(data)
        # A value that is out of its range is one of a flag, wherever the flag stood; a path that
        # leads elsewhere is named itself.
        names = (path.name, "--", "mini-batch", str(self.folder), "/etc/passwd")

        def use() -> object:
            if name == "sweep":
                return read_sweep(path)
            command, settings = parse([name, "--config", str(path)])
            if not isinstance(settings, Config):
                return command
            return run_command("train", "--config", str(path), "--dry-run", "--run", "never")

        found = attempt(use, *names)
        return found if isinstance(found, Outcome) else Outcome(OTHER)
