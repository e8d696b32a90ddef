"""Atomic checkpoints: each is one file with everything that a run needs to resume.

    checkpoints/00000123.safetensors    tensors, and as metadata all other values
    best-00000100.safetensors           the network of the best validation so far
    checkpoints/best-00000050.safetensors   an earlier one, which a checkpoint still names

Files are renamed into place (rename(2)) after fsync(2), a checkpoint after the record, which holds
each of its steps, and after the best network, which it names by step and SHA-256. A checkpoint that
does not match its checksum is skipped, and the previous one is used; one that cannot be read for
another reason (an unmounted file system, a newer format) ends the launch, because it may be intact.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hpctrain.config import Every
from hpctrain.cores import make_pool
from hpctrain.errors import RunError, UsageError
from hpctrain.fault import fault
from hpctrain.files import sync
from hpctrain.memory import empty_on_host
from hpctrain.models.weights import CorruptFile, Tensors, read_tensors, write_tensors
from hpctrain.report.find import CHECKPOINTS, best_file, best_steps, checkpoint_steps
from hpctrain.report.record import FILE_NAME

FORMAT = 1


class Checkpoint(NamedTuple):
    """A checkpoint that matches its checksum."""

    step: int
    state: dict[str, Any]
    path: Path
    best: str  # SHA-256 of the best network so far, if any

    def tensors(self) -> Tensors:
        """Read the tensors into host memory. Raises CorruptFile or RunError if that fails."""
        return read(self.path)[0]


class Writer:
    """Writes checkpoints of one run in the background and keeps the newest few.

    Also the best network so far; each checkpoint names the one that was written before it. Rank 0
    passes the folder of the run. All other ranks pass None, and nothing is written.
    """

    def __init__(self, run: Path | None, interval: Every, keep: int, best: str = "") -> None:
        """`best` is the SHA-256 of the best network, if an earlier launch has written one."""
        self._run = run
        self.interval = interval
        self._keep = keep
        self._best = best
        self._saved = time.monotonic()  # time of the last checkpoint
        self._last: Mapping[str, Any] | None = None  # its state
        self.stall = 0.0  # longest time that a checkpoint blocked training, in seconds
        self.seconds = 0.0  # longest time that writing took
        self._host: Tensors = {}
        self._pool = make_pool(1, "writer")
        self._task: Future[None] | None = None  # not yet checked for an error

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        """Wait until pending writes are complete, also after an error."""
        self._pool.shutdown()

    def overdue(self) -> bool:
        """Whether it is time to save. Raises RunError if an earlier write failed."""
        if self._task and self._task.done():
            self.wait()
        is_time = time.monotonic() - self._saved >= self.interval.seconds
        return is_time and self._run is not None

    def save(self, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
        """Copy the tensors to host memory and write them, with the `state`, in the background.

        `state` holds the step. Waits for the previous checkpoint first; raises RunError if writing
        it failed. Does nothing if the last checkpoint had the same state.
        """
        began = time.perf_counter()
        self.wait()  # the host copies are in use until then
        if self._run is None or self._last == state:
            return
        for name, tensor in tensors.items():
            host = self._host.get(name)
            if host is None or (host.shape, host.dtype) != (tensor.shape, tensor.dtype):
                self._host[name] = empty_on_host(tensor.shape, tensor.dtype, tensor.device)
            self._host[name].copy_(tensor.detach())
        copies = {name: self._host[name] for name in tensors}
        self._last = state
        self._begin(partial(self._write, self._run, state, copies))
        self._saved = time.monotonic()
        self.stall = max(self.stall, time.perf_counter() - began)

    def save_best(self, step: int, tensors: Tensors, metadata: Mapping[str, Any]) -> None:
        """Write the best network so far in the background. Raises RunError as `wait` does."""
        self.wait()
        if self._run is not None:
            self._begin(partial(self._write_best, self._run, step, tensors, metadata))

    def wait(self) -> None:
        """Wait until everything is written. Raises RunError if writing failed."""
        task = self._task
        self._task = None
        if task and (error := task.exception()) is not None:
            reason = getattr(error, "strerror", None) or str(error)
            raise RunError(f"cannot write a checkpoint to {self._run}: {reason}") from error

    def _begin(self, write: Callable[[], None]) -> None:
        def timed() -> None:
            began = time.perf_counter()
            write()
            self.seconds = max(self.seconds, time.perf_counter() - began)

        self._task = self._pool.submit(timed)

    def _write_best(
        self, run: Path, step: int, tensors: Tensors, metadata: Mapping[str, Any]
    ) -> None:
        """Write the best network; one before it moves beside the checkpoints that name it."""
        named = named_steps(run)
        earlier = [before for before in best_steps(run) if before != step]
        self._best = write_tensors(best_file(run, step), tensors, metadata, "best")
        for old in earlier:
            path = best_file(run, old)
            if old in named:
                path.rename(superseded_file(run, old))
            else:
                path.unlink()
            fault("best.superseded")
        if earlier:
            sync(run / CHECKPOINTS)
            sync(run)

    def _write(self, run: Path, state: Mapping[str, Any], tensors: Tensors) -> None:
        fault("checkpoint.begun")
        sync(run / FILE_NAME)  # a step in the checkpoint must be in the record too
        fault("record.synced")
        folder = run / CHECKPOINTS
        step = state["step"]
        metadata = {"format": FORMAT, "step": step, "state": state, "best": self._best}
        write_tensors(_file(folder, step), tensors, metadata, "checkpoint")
        for old in checkpoint_steps(folder)[: -self._keep]:
            _file(folder, old).unlink()
        named = named_steps(run)
        for unnamed in {*best_steps(run)} - named:
            best_file(run, unnamed).unlink()
        for unnamed in {*best_steps(folder)} - named:
            superseded_file(run, unnamed).unlink()


def named_steps(run: Path) -> set[int]:
    """Return the steps of the best networks that the checkpoints name: the last before each."""
    folder = run / CHECKPOINTS
    networks = {*best_steps(run), *best_steps(folder)}
    checkpoints = checkpoint_steps(folder)
    return {max((best for best in networks if best <= step), default=0) for step in checkpoints}


def superseded_file(run: Path, step: int) -> Path:
    """Return the name of a best network that a checkpoint names, once there is a better one."""
    return best_file(run / CHECKPOINTS, step)


def find_best(run: Path, step: int) -> Path:
    """Return where the best network of `step` is, superseded or not, or would be."""
    superseded = superseded_file(run, step)
    return superseded if superseded.exists() else best_file(run, step)


def make_ready(run: Path, step: int, best: int) -> None:
    """Prepare a run's folder to resume after `step`, with the best network of `best`.

    Removes temporary files of killed writers, and checkpoints and best networks of later steps:
    those were skipped, and will be trained again. Raises OSError.
    """
    folder = run / CHECKPOINTS
    folder.mkdir(exist_ok=True)
    later = [_file(folder, number) for number in checkpoint_steps(folder) if number > step]
    later += [best_file(run, number) for number in best_steps(run) if number > best]
    later += [superseded_file(run, number) for number in best_steps(folder) if number > best]
    for stale in (*run.glob(".*.tmp"), *folder.glob(".*.tmp"), *later):
        stale.unlink()
    if (path := find_best(run, best)) != best_file(run, best):
        path.rename(best_file(run, best))


def _file(folder: Path, step: int) -> Path:
    return folder / f"{step:08}.safetensors"


def newest(run: Path) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest intact checkpoint of a run, if any, and a line for each corrupt newer one.

    Raises UsageError or RunError if one cannot be read but may be intact.
    """
    corrupt: list[str] = []
    for step in reversed(checkpoint_steps(run / CHECKPOINTS)):
        path = _file(run / CHECKPOINTS, step)
        try:
            _, metadata, sha256 = read(path)
            if sha256 is None or metadata["step"] != step:
                raise CorruptFile(f"{path} is none of step {step}")
        except CorruptFile as error:
            corrupt.append(f"checkpoint {error}: passed over")
            continue
        if metadata["format"] > FORMAT:
            raise UsageError(
                f"{path} has format {metadata['format']}, this hpctrain knows {FORMAT}: use the"
                " hpctrain that wrote it"
            )
        return Checkpoint(step, metadata["state"], path, metadata["best"]), corrupt
    return None, corrupt


def has_best(path: Path, sha256: str) -> bool:
    """Whether the best network is there, with this SHA-256.

    Raises UsageError if the file holds anything else, and RunError if it cannot be read.
    """
    if not path.exists():
        return False
    with suppress(CorruptFile):
        if read(path)[2] == sha256:
            return True
    raise UsageError(
        f"{path} is not the network that the checkpoint names (SHA-256 {sha256[:16]}...): put it"
        " back, or remove it, and the best of what follows is kept"
    )


def read(path: Path) -> tuple[Tensors, dict[str, Any], str | None]:
    """Read a file as `read_tensors` does. Raises CorruptFile, or RunError if it may be intact."""
    try:
        return read_tensors(path)
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}; it may be whole") from error
