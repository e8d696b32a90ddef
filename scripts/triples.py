"""Train triples of a transform, an optimizer and a network of other libraries on 1 and 3 ranks.

    PYTHONPATH=tests/libraries/site python -m scripts.triples              # 100 triples
    PYTHONPATH=tests/libraries/site python -m scripts.triples 3 17 --keep  # two of them

Each triple trains for 12 steps on one rank and on three. One of the two runs is interrupted at a
random step, and resumed on another number of ranks: by a notice, which saves that step, or by an
error, so that steps since the last checkpoint are made again. Both must end with the same digest,
weights and figures. Networks have dropout, and each transform is followed by a slow one, so that
the thread which loads images works while the network draws.

The table of accepted parts (hpctrain/config/parts.toml) gives transforms and optimizers: the list
goes through both until it is full. Needs the extra `test`. Exit code 1 if a triple differs, or
fewer than 85 of 100 train.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import hpctrain as hp
from hpctrain.parallel.mpi import agreed
from hpctrain.training.step import Trainer
from scripts.parts import accepted_parts
from scripts.parts.transforms import ARGUMENTS
from tests.support.launches import check_same, launch
from tests.support.ranks import RankError, on_ranks

COUNT = 100
LEAST = 0.85  # of the triples must train
ROWS = 36
STEPS = 12
SIDE = 32  # pixels
TRIED = "64"  # those of the arguments by which transforms are tried
SLOW = "tests.support.own_functions:slowly"
NETWORKS = (
    "tests.support.nets:with_dropout",
    "timm:test_resnet(drop_rate=0.3)",
    "timm:test_convnext(drop_rate=0.2, drop_path_rate=0.1)",
    "timm:test_efficientnet(drop_rate=0.2)",
    "timm:test_vit(drop_rate=0.1, attn_drop_rate=0.1)",
    "timm:test_byobnet(drop_rate=0.2)",
    "tests.support.nets:with_dropout",
)
SIZES = (1, 2, 3)  # ranks
FAILED = "a step fails, as it was asked to"


class Triple(NamedTuple):
    """What one run is made of, beside a slow transform of the user's own."""

    number: int
    transform: str
    optimizer: str
    network: str

    def __str__(self) -> str:
        return f"{self.number:3}  {self.transform}  {self.optimizer}  {self.network}"


class Result(NamedTuple):
    """How a triple ended: trained, refused or different, and why."""

    outcome: str
    why: str = ""


def list_triples(count: int = COUNT) -> list[Triple]:
    """Return so many triples: numbers and parts are the same in every call."""
    transforms = [with_arguments(name) for name in accepted_parts("augment")]
    optimizers = accepted_parts("optimizer")
    drawn = random.Random(0)
    for names in (transforms, optimizers):
        drawn.shuffle(names)
    return [
        Triple(
            number,
            transforms[number % len(transforms)],
            optimizers[number % len(optimizers)],
            NETWORKS[number % len(NETWORKS)],
        )
        for number in range(count)
    ]


def with_arguments(transform: str) -> str:
    """Return a transform with the arguments by which it was tried."""
    return f"{transform}({ARGUMENTS.get(transform, '').replace(TRIED, str(SIDE))})"


def write_data(folder: Path) -> Path:
    """Write a pack of images that can be learnt."""
    drawn = np.random.default_rng(0)
    labels = np.arange(ROWS) % 3
    images = drawn.integers(0, 200, (ROWS, SIDE, SIDE, 3), np.uint8)
    images[..., 0] += (20 * labels[:, None, None]).astype(np.uint8)
    pack = folder / "pack.h5"
    hp.write_pack(pack, {"train": (images, labels)}, ("a", "b", "c"))
    return pack


def settings_of(triple: Triple, pack: Path) -> dict[str, Any]:
    """Return the settings of a triple's runs but for their names."""
    return {
        "data": str(pack),
        "runs_dir": str(pack.parent / f"{triple.number}"),
        "augment": (triple.transform, SLOW),
        "optimizer": triple.optimizer,
        "model": triple.network,
        "lr": 0.001,
        "weight_decay": 0.01,
        "batch_size": 6,
        "shards": 3,
        "epochs": 2,
        "deterministic": True,
        "threads": 1,
        "device": "cpu",
        "checkpoint_every": "3steps",
        "test": False,
        "progress": "none",
    }


def run_triple(triple: Triple, pack: Path) -> Result:
    """Train a triple as a whole and interrupted, and compare."""
    settings = settings_of(triple, pack)
    whole = settings | {"run": "whole"}
    interrupted = settings | {"run": "interrupted"}
    sizes = (1, 3)
    if triple.number % 2:
        sizes = (3, 1)
    ended = launch(whole, sizes[0])
    if ended.code:
        return Result("refused", ended.error)
    try:
        assert (ended.status, ended.step) == ("done", STEPS), ended
        interrupt(triple, interrupted, sizes[1])
        check_same(interrupted, whole)
    except RankError:
        raise
    except AssertionError as error:
        *_, frame = traceback.extract_tb(error.__traceback__)
        return Result("different", f"{frame.line}  {error}".partition("\n")[0])
    return Result("trained")


def interrupt(triple: Triple, settings: dict[str, Any], size: int) -> None:
    """Begin a run on `size` ranks, end it at a random step, and resume it on another number."""
    drawn = random.Random(triple.number)
    if drawn.random() < 0.5:
        ended = launch(settings, size, leave=drawn.randrange(1, STEPS - 1))
        assert ended.status == "preempted", ended
    else:
        ended = launch(settings, size, first=partial(fail_in_step, drawn.randrange(2, STEPS + 1)))
        assert FAILED in ended.error, ended
    ended = launch(settings, drawn.choice([other for other in SIZES if other != size]))
    assert ended.status == "done", ended


def fail_in_step(number: int, patch: pytest.MonkeyPatch) -> None:
    """Let a step of the next launch fail on this rank, before it is made."""
    steps = itertools.count(1)
    make_step = Trainer.step

    def step(*given: Any) -> Any:
        if next(steps) == number:
            raise agreed(hp.RunError(FAILED))
        return make_step(*given)

    patch.setattr(Trainer, "step", step)


def import_libraries(comm: Any) -> None:
    """Import on a rank what the triples need: this takes longer than a run."""
    for name in ("kornia.augmentation", "torchvision.transforms.v2", "timm.optim"):
        importlib.import_module(name)


def run_all(triples: Sequence[Triple], report: Callable[[str], object] = print) -> bool:
    """Run triples, report each and their counts, and return whether they are as they must be."""
    counts: Counter[str] = Counter()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hpctrain-triples-") as folder:
        pack = write_data(Path(folder))
        on_ranks(max(SIZES), import_libraries)
        for triple in triples:
            result = run_triple(triple, pack)
            counts[result.outcome] += 1
            report(f"{result.outcome:9} {triple}  {result.why}".rstrip())
    report(f"{dict(counts)} in {time.monotonic() - began:.0f} s")
    return not counts["different"] and counts["trained"] >= LEAST * len(triples)


def main() -> int:
    """Run all triples, or those of the numbers that are given."""
    parser = argparse.ArgumentParser(prog="python -m scripts.triples")
    parser.add_argument("numbers", nargs="*", type=int, help=f"of triples; default: all {COUNT}")
    numbers = parser.parse_args().numbers or range(COUNT)
    triples = list_triples()
    return int(not run_all([triples[number] for number in numbers]))


if __name__ == "__main__":
    sys.exit(main())
