"""A matrix of settings on emulated GPUs: every cell is a short run, and the same on the CPU.

    HPCTRAIN_EMULATED_GPUS=4 tests/gpu/emulator/run mpirun -n 4 python -m tests.gpu.matrix FOLDER
    ... python -m tests.gpu.matrix FOLDER all

Cells are chosen so that every pair of values of two axes is in one of them; each runs in its own
order and late. In tree order their digest is that of one rank with one Allreduce a step. `all` runs
the whole product of the axes but for those in TURNS, which take turns. All cells run in one launch:
those of fewer ranks on its first ranks. FOLDER/cells.jsonl has what each cell came to; `problems`
checks it.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import emulated_gpu
import numpy as np

import hpctrain as hp
from tests.gpu.emulator import ORDERS
from tests.support.api import command_line, read_records, transport
from tests.support.leaving import leave_after
from tests.support.packs import make_pack
from tests.support.pictures import class_folders
from tests.support.ranks import alone, world_of

AXES: dict[str, tuple[Any, ...]] = {
    "job": ("classify", "dropout", "denoise", "jpeg", "resume", "infer"),
    "transport": ("host", "mpi-gpu", "nccl"),
    "sum": ("plain", "tree", "bf16"),
    "launch": ("eager", "overlap", "graphs"),
    "precision": ("default", "fp32", "tf32", "bf16"),
    "batch_norm": ("exact", "running", "average"),
    "ranks": (1, 2, 3, 4),
    "order": ORDERS,  # of the devices' work
}
WAYS = ("transport", "sum", "launch")  # only tried where several ranks train
TURNS = ("batch_norm", "ranks", "order")  # take turns where all other axes are multiplied
SHARDS = 4
STEPS = 3  # until a run that is resumed leaves
SEGMENTS = 3  # of overlapped sums
# Relative difference of losses between a GPU and a CPU: the CPU's kernels compute both, but not
# always the same ones; bfloat16 has 8 significant bits, and a GPU draws other noise than a CPU.
CLOSE = {"bf16": 0.05, "denoise": 0.05}
MODELS = {"denoise": "auto", "dropout": "tests.support.nets:with_dropout"}


class Cell(NamedTuple):
    """A value of every axis."""

    job: str
    transport: str
    sum: str
    launch: str
    precision: str
    batch_norm: str
    ranks: int
    order: str


def pairwise(seed: int = 0) -> list[Cell]:
    """Cells in which every pair of values of two axes is tried: the best of some random cells is
    taken until no pair is left.
    """
    rng, names = random.Random(seed), list(AXES)
    left = set().union(*(pairs(Cell(*values)) for values in itertools.product(*AXES.values())))
    cells: list[Cell] = []
    while left:
        (a, x), (b, y) = min(left, key=repr)
        drawn = [Cell(*(rng.choice(AXES[name]) for name in names)) for _ in range(1000)]
        found = [cell._replace(**{a: x, b: y}) for cell in drawn]
        best = max(found, key=lambda cell: len(left & pairs(cell)))
        left -= pairs(best)
        cells.append(best)
    return cells


def is_idle(values: Mapping[str, Any]) -> bool:
    """Whether nothing is exchanged in a cell with these values."""
    return values.get("job") == "infer" or values.get("ranks") == 1


def pairs(cell: Cell) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    """Every two values that are tried in a cell."""
    values = cell._asdict()
    tried = [(a, x) for a, x in values.items() if not (is_idle(values) and a in WAYS)]
    return set(itertools.combinations(tried, 2))


def product(seed: int = 0) -> Iterator[Cell]:
    """All cells; the axes of TURNS, which are the last ones, take turns in random order."""
    rng, turns = random.Random(seed), list(itertools.product(*(AXES[name] for name in TURNS)))
    left: list[tuple[Any, ...]] = []
    for values in itertools.product(*(AXES[name] for name in AXES if name not in TURNS)):
        left = left or rng.sample(turns, len(turns))
        yield Cell(*values, *left.pop())


def settings_of(cell: Cell, folder: Path, device: str) -> hp.Config:
    """The run of a cell on this device."""
    gpu = device == "cuda"
    name = "-".join(map(str, cell)) if gpu else f"cpu-{'-'.join(map(str, reference_of(cell)))}"
    jpeg = cell.job == "jpeg"
    return hp.Config(
        data=str(folder / ("jpeg.h5" if jpeg else "pack.h5")),
        runs_dir=str(folder / "runs"),
        run=name,
        progress="none",
        model=MODELS.get(cell.job, "digits"),
        task="denoise" if cell.job == "denoise" else "classify",
        epochs=2,
        batch_size=16,
        shards=SHARDS,
        flip=cell.job not in ("denoise", "jpeg"),
        shift=0 if cell.job in ("denoise", "jpeg") else 2,
        random_crop=0.3 if jpeg else 0.0,
        deterministic=cell.sum == "tree",
        comm_dtype="bf16" if cell.sum == "bf16" else "fp32",
        batch_norm=cell.batch_norm,
        overlap=SEGMENTS if gpu and cell.launch == "overlap" else 0,
        cuda_graphs=gpu and cell.launch == "graphs",
        reduce=cell.transport if gpu and cell.ranks > 1 else "auto",
        precision=cell.precision,
        device=device,
        threads=1,
        hang_timeout="60s",
    )


def reference_of(cell: Cell) -> Cell:
    """The cell whose run on the CPU is that of `cell`: transports and launches are a GPU's."""
    job = {"resume": "classify", "infer": "classify"}.get(cell.job)
    same = {"transport": "host", "launch": "eager", "order": "early"}
    return cell._replace(**same, job=job or cell.job)


class Matrix:
    """Runs cells in a folder, on the first 1, 2, ... ranks. Collective."""

    def __init__(self, folder: Path, comm: Any) -> None:
        self.folder, self.comm = folder, comm
        self._found: dict[tuple[Cell, str], dict[str, Any]] = {}
        if comm.rank == 0:
            make_pack(folder / "pack.h5", {"train": 61, "validation": 13, "test": 23})
            shape = {"width": 41, "height": 37}
            files = class_folders(folder / "images", {"a": 31, "b": 23}, ".jpg", **shape)
            how = ["--size", "17x13", "--split", "0.8,0.1,0.1", "--encoding", "jpeg"]
            packed = alone("pack", files, "--output", folder / "jpeg.h5", "--jobs", "1", *how)
            assert packed.code == 0, packed.err
        comm.Barrier()

    def wait_for_all(self) -> None:
        """A barrier in which ranks that have nothing to do sleep: the cores are for the others."""
        request = self.comm.Ibarrier()
        while not request.Test():
            time.sleep(0.005)

    def train(self, cell: Cell, device: str, ranks: int) -> dict[str, Any]:
        """Train on the first `ranks` ranks: losses, and the digest of the end."""
        config = settings_of(cell, self.folder, device)
        if self.comm.rank < ranks:
            with world_of(ranks):
                hp.train(config)
        self.wait_for_all()
        records = list(read_records(self.folder / "runs" / str(config.run)))
        losses = {r["step"]: r["loss"] for r in records if r["kind"] == "step"}
        test = [r["loss"] for r in records if r["kind"] == "evaluation"]
        return {"losses": [*losses.values(), *test], "digest": records[-1].get("digest")}

    def once(self, cell: Cell, device: str) -> dict[str, Any]:
        """What training came to, for all cells that share it."""
        if (cell, device) not in self._found:
            self._found[cell, device] = self.train(cell, device, cell.ranks)
        return self._found[cell, device]

    def infer(self, cell: Cell, device: str) -> dict[str, Any]:
        """What `evaluate` and `predict` say of the network that was trained on the CPU."""
        run = self.folder / "runs" / str(settings_of(cell, self.folder, "cpu").run)
        table, rows = (self.folder / f"{name}-{device}" for name in ("evaluate", "predict"))
        same = [str(run), "--batch-size", "5", "--device", device, "--threads", "1"]
        same += ["--precision", cell.precision, "--output"]
        if self.comm.rank < cell.ranks:
            with world_of(cell.ranks):
                for name, output in (("evaluate", table), ("predict", rows)):
                    assert command_line([name, *same, str(output)]) == 0
        self.wait_for_all()
        found = json.loads(table.read_text())
        lines = [line.split(",") for line in rows.read_text().splitlines()[1:]]
        numbers = [float(number) for line in lines for number in line[-3:]]
        return {"losses": [found["loss"], *itertools.chain(*found["confusion"]), *numbers]}

    def run(self, cell: Cell) -> dict[str, Any]:
        """What a cell came to on the CPU, and on the emulated GPU in its order and late.

        Dropout, for which a GPU draws other numbers, is expected to be that of one rank on a GPU.
        """
        reference = reference_of(cell)
        alone = reference._replace(ranks=1)
        if cell.job == "dropout":
            found = {"expected": self.once(alone, "cuda")}
        else:
            found = {"expected": self.once(reference, "cpu")}
        if cell.job == "infer":
            found = {"expected": self.infer(cell, "cpu")}
        elif cell.sum == "tree":
            found["one"] = self.once(alone, "cuda")
        for order in {cell.order: None, "late": None}:
            emulated_gpu.set_order(order)
            found[order] = self.on_gpu(cell._replace(order=order))
        emulated_gpu.set_order("early")
        return found

    def on_gpu(self, cell: Cell) -> dict[str, Any]:
        """What a cell came to on the emulated GPU."""
        if cell.job == "infer":
            return self.infer(cell, "cuda")
        if cell.job != "resume":
            return self.train(cell, "cuda", cell.ranks)
        with leave_after(STEPS):
            self.train(cell, "cuda", cell.ranks)
        return self.train(cell, "cuda", cell.ranks % SHARDS + 1)


def problems(found: Sequence[dict[str, Any]]) -> list[str]:
    """What is wrong with the cells of a matrix: other losses than expected; in another order,
    another digest; in tree order, another one than that of one rank.
    """
    wrong: list[str] = []
    for result in found:
        cell, name = Cell(*result["cell"]), " ".join(map(str, result["cell"]))
        if "error" in result:
            wrong.append(f"{name}: {result['error']}")
            continue
        keys = "expected", cell.order, "late"
        expected, *gpu = (np.array(result[key]["losses"]) for key in keys)
        close = max(CLOSE.get(cell.precision, 1e-3), CLOSE.get(cell.job, 1e-3))
        for losses in gpu:
            alike = losses.shape == expected.shape
            if not alike or not np.allclose(losses, expected, rtol=close, atol=1e-4):
                wrong.append(f"{name}: {losses.tolist()}, expected {expected.tolist()}")
        ends = {
            key: result[key].get("digest") for key in (cell.order, "late", "one") if key in result
        }
        if len(set(ends.values())) > 1:
            wrong.append(f"{name}: digests {ends}")
    return wrong


def run_cells(cells: Iterable[Cell], folder: Path, comm: Any, stop: bool) -> list[dict[str, Any]]:
    """Run cells, with `stop` until one has a problem, and write what each came to, a line each.
    Collective.
    """
    transport.is_gpu_aware = lambda rocm: True  # the emulated GPU's memory is host memory
    matrix, found = Matrix(folder, comm), []
    for cell in cells:
        started = time.perf_counter()
        try:
            result = matrix.run(cell)
        except (hp.UsageError, hp.RunError) as error:
            if not error.agreed:
                raise  # on one rank alone: the others would wait
            result = {"error": str(error)}
        found.append({"cell": cell, **result, "seconds": round(time.perf_counter() - started, 2)})
        if comm.rank == 0:
            with open(folder / "cells.jsonl", "a") as file:
                file.write(json.dumps(found[-1]) + "\n")
        if stop and comm.bcast(problems(found)):
            break
    return found


def main(folder: str, which: str = "pairwise") -> int:
    """Run the matrix; one line for each problem, on rank 0."""
    comm = hp.start_mpi()
    cells = product() if which == "all" else pairwise()
    found = run_cells(cells, Path(folder), comm, stop=which != "all")
    wrong = comm.bcast(problems(found))
    if comm.rank == 0:
        print("\n".join([*wrong, f"{len(found)} cells, {len(wrong)} problems"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
