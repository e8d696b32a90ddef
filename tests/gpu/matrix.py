"""A matrix of settings on emulated GPUs: every cell is a short run, and the same on the CPU.

    HPCTRAIN_EMULATED_GPUS=4 tests/gpu/emulator/run mpirun -n 4 python -m tests.gpu.matrix FOLDER
    ... python -m tests.gpu.matrix FOLDER all

Cells are chosen so that every pair of values of two axes is in one of them; each runs in its own
order and late. `all` runs the whole product of the axes but for ranks and orders, which take turns.
All cells run in one launch: those of fewer ranks on its first ranks. FOLDER/cells.jsonl has what
each cell came to; `problems` checks it.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import emulated_gpu
import numpy as np

from hpctrain.config import Config
from hpctrain.config.others import EvaluateConfig, PredictConfig
from hpctrain.errors import Failure
from hpctrain.inference import evaluate, predict
from hpctrain.parallel import choose
from hpctrain.parallel.mpi import Comm, start_mpi
from hpctrain.report.record import read_records
from hpctrain.training.train import train
from tests.data.pictures import class_folders, pack
from tests.gpu.emulator import ORDERS
from tests.packs import make_pack
from tests.training.runs import leave_after, short_run

AXES: dict[str, tuple[Any, ...]] = {
    "job": ("classify", "denoise", "jpeg", "resume", "evaluate", "predict"),
    "transport": ("host", "mpi-gpu", "nccl"),
    "sum": ("plain", "tree", "bf16"),
    "launch": ("eager", "overlap", "graphs"),
    "precision": ("default", "fp32", "tf32", "bf16"),
    "ranks": (1, 2, 3, 4),
    "order": ORDERS,  # of the devices' work
}
USES = ("evaluate", "predict")  # jobs that train nothing
TURNS = ("ranks", "order")  # axes that take turns where all others are multiplied
SHARDS = 4
STEPS = 3  # until a run that is resumed leaves
# Relative difference of losses between a GPU and a CPU: the CPU's kernels compute both, but not
# always the same ones; bfloat16 has 8 significant bits, and a GPU draws other noise than a CPU.
CLOSE = {"bf16": 0.05, "denoise": 0.05}


class Cell(NamedTuple):
    """A value of every axis."""

    job: str
    transport: str
    sum: str
    launch: str
    precision: str
    ranks: int
    order: str


def pairwise(seed: int = 0) -> list[Cell]:
    """Cells in which every pair of values of two axes occurs: the best of some random cells is
    taken until no pair is left.
    """
    rng, names = random.Random(seed), list(AXES)
    left = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x, y in itertools.product(AXES[a], AXES[b])
    }
    cells: list[Cell] = []
    while left:
        (a, x), (b, y) = min(left, key=repr)
        drawn = [Cell(*(rng.choice(AXES[name]) for name in names)) for _ in range(200)]
        found = [cell._replace(**{a: x, b: y}) for cell in drawn]
        best = max(found, key=lambda cell: len(left & pairs(cell)))
        left -= pairs(best)
        cells.append(best)
    return sorted(cells, key=lambda cell: cell.transport == "mpi-gpu")  # its trial takes seconds


def pairs(cell: Cell) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    """Every two values of a cell."""
    return set(itertools.combinations(zip(AXES, cell, strict=True), 2))


def product() -> Iterator[Cell]:
    """All cells; ranks and orders take turns."""
    turns = itertools.cycle(itertools.product(*(AXES[name] for name in TURNS)))
    multiplied = [values for name, values in AXES.items() if name not in TURNS]
    for values in itertools.product(*multiplied):
        yield Cell(*values, *next(turns))


def settings_of(cell: Cell, folder: Path, device: str) -> Config:
    """The run of a cell on this device."""
    gpu = device == "cuda"
    name = "-".join(map(str, cell)) if gpu else f"cpu-{'-'.join(map(str, reference_of(cell)))}"
    jpeg = cell.job == "jpeg"
    return short_run(
        folder,
        "jpeg.h5" if jpeg else "pack.h5",
        run=name,
        model="auto" if cell.job == "denoise" else "digits",
        task="denoise" if cell.job == "denoise" else "classify",
        epochs=2,
        batch_size=16,
        shards=SHARDS,
        flip=cell.job not in ("denoise", "jpeg"),
        shift=0 if cell.job in ("denoise", "jpeg") else 2,
        random_crop=0.3 if jpeg else 0.0,
        deterministic=cell.sum == "tree",
        wire="bf16" if cell.sum == "bf16" else "fp32",
        overlap=3 if gpu and cell.launch == "overlap" else 0,
        graphs=gpu and cell.launch == "graphs",
        reduce=cell.transport if gpu and cell.ranks > 1 else "auto",
        precision=cell.precision,
        device=device,
        digest_every=3,
        threads=1,
        timeout="60s",
    )


def reference_of(cell: Cell) -> Cell:
    """The cell whose run on the CPU is that of `cell`: transports and launches are a GPU's."""
    job = {"resume": "classify", "evaluate": "classify", "predict": "classify"}.get(cell.job)
    same = {"transport": "host", "launch": "eager", "order": "early"}
    return cell._replace(**same, job=job or cell.job)


class Matrix:
    """Runs cells in a folder, on communicators of the first 1, 2, ... ranks. Collective."""

    def __init__(self, folder: Path, comm: Comm) -> None:
        self.folder, self.comm = folder, comm
        self.comms = {n: comm.Split(int(comm.rank < n)) for n in AXES["ranks"]}
        self._cpu: dict[Cell, dict[str, Any]] = {}
        if comm.rank == 0:
            make_pack(folder / "pack.h5", {"train": 61, "validation": 13, "test": 23})
            files = class_folders(
                folder / "images", {"a": 31, "b": 23}, ".jpg", width=41, height=37
            )
            pack(files, folder / "jpeg.h5", size="17x13", split="0.8,0.1,0.1", encoding="jpeg")
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
            train(config, self.comms[ranks])
        self.wait_for_all()
        records = list(read_records(self.folder / "runs" / str(config.run)))
        losses = {r["step"]: r["loss"] for r in records if r["kind"] == "step"}
        test = [r["loss"] for r in records if r["kind"] == "evaluation"]
        return {"losses": [*losses.values(), *test], "digest": records[-1].get("digest")}

    def on_cpu(self, cell: Cell) -> dict[str, Any]:
        """The same run on the CPU, once for all cells that share it."""
        cell = reference_of(cell)
        if cell not in self._cpu:
            self._cpu[cell] = self.train(cell, "cpu", cell.ranks)
        return self._cpu[cell]

    def use(self, cell: Cell, device: str) -> list[float]:
        """What `evaluate` or `predict` says of the network that was trained on the CPU."""
        run = str(self.folder / "runs" / str(settings_of(cell, self.folder, "cpu").run))
        output = self.folder / f"{cell.job}-{device}"
        same = {
            "run": run,
            "runs_dir": str(self.folder / "runs"),
            "output": str(output),
            "batch": 5,
        }
        same |= {"device": device, "threads": 1, "precision": cell.precision}
        if self.comm.rank < cell.ranks:
            if cell.job == "evaluate":
                evaluate.start_mpi = lambda: self.comms[cell.ranks]
                evaluate.main(EvaluateConfig(**same))
            else:
                predict.start_mpi = lambda: self.comms[cell.ranks]
                predict.main(PredictConfig(**same))
        self.wait_for_all()
        if cell.job == "evaluate":
            found = json.loads(output.read_text())
            return [found["loss"], *itertools.chain(*found["confusion"])]
        rows = [line.split(",") for line in output.read_text().splitlines()[1:]]
        return [float(number) for row in rows for number in row[-3:]]

    def run(self, cell: Cell) -> dict[str, Any]:
        """What a cell came to on the CPU, and on the emulated GPU in its order and late."""
        found = {"cpu": self.on_cpu(cell)}
        if cell.job in USES:
            found = {"cpu": {"losses": self.use(cell, "cpu")}}
        for order in {cell.order: None, "late": None}:
            emulated_gpu.set_order(order)
            found[order] = self.on_gpu(cell._replace(order=order))
        emulated_gpu.set_order("early")
        return found

    def on_gpu(self, cell: Cell) -> dict[str, Any]:
        """What a cell came to on the emulated GPU."""
        if cell.job in USES:
            return {"losses": self.use(cell, "cuda")}
        if cell.job != "resume":
            return self.train(cell, "cuda", cell.ranks)
        with leave_after(STEPS):
            self.train(cell, "cuda", cell.ranks)
        return self.train(cell, "cuda", cell.ranks % SHARDS + 1)


def problems(found: Sequence[dict[str, Any]]) -> list[str]:
    """What is wrong with the cells of a matrix: other losses than the CPU's; other digests in
    another order, or than those of the same network that was summed in tree order on other ranks
    and by other ways.
    """
    wrong: list[str] = []
    digests: dict[tuple[str, str], str] = {}
    for result in found:
        cell, name = Cell(*result["cell"]), " ".join(map(str, result["cell"]))
        if "error" in result:
            wrong.append(f"{name}: {result['error']}")
            continue
        cpu, *gpu = (np.array(result[key]["losses"]) for key in ("cpu", cell.order, "late"))
        close = max(CLOSE.get(cell.precision, 1e-3), CLOSE.get(cell.job, 1e-3))
        for losses in gpu:
            if losses.shape != cpu.shape or not np.allclose(losses, cpu, rtol=close, atol=1e-4):
                wrong.append(f"{name}: {losses.tolist()} on the GPU, {cpu.tolist()} on the CPU")
        ends = {result[order].get("digest") for order in (cell.order, "late")}
        if cell.sum == "tree" and cell.job not in USES:
            ends.add(digests.setdefault((reference_of(cell).job, cell.precision), min(ends)))
        if len(ends) > 1:
            wrong.append(f"{name}: digests {', '.join(sorted(ends))}")
    return wrong


def run_cells(cells: Iterable[Cell], folder: Path, comm: Comm, stop: bool) -> list[dict[str, Any]]:
    """Run cells, with `stop` until one has a problem, and write what each came to, a line each.
    Collective.
    """
    # one MPI: a process for it once, not in each run
    choose.try_device_memory = functools.cache(choose.try_device_memory)
    matrix, found = Matrix(folder, comm), []
    for cell in cells:
        started = time.perf_counter()
        try:
            result = matrix.run(cell)
        except Failure as error:
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
    comm = start_mpi()
    cells = product() if which == "all" else pairwise()
    found = run_cells(cells, Path(folder), comm, stop=which != "all")
    wrong = comm.bcast(problems(found))
    if comm.rank == 0:
        print("\n".join([*wrong, f"{len(found)} cells, {len(wrong)} problems"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
