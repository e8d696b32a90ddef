"""Atomic checkpoints: everything that a run needs to resume.

    checkpoints/00000123.safetensors    tensors
    checkpoints/00000123.json           everything else, with name, size and SHA-256 of the tensors

A pair is complete once its JSON file exists, which is written last. Each file is renamed into place
(rename(2)) after fsync(2). If a step is saved again, its tensors get another name, so that the
existing JSON file stays valid until it is replaced. A pair that does not match its checksum is
skipped, and the previous one is used; one that cannot be read for another reason (an unmounted file
system, a newer format) ends the launch, because it may be intact. Reading executes no code
(safetensors and JSON, no pickle).
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hpctrain.config import Interval
from hpctrain.errors import RunError, UsageError
from hpctrain.fault import fault
from hpctrain.files import sync, whole_file
from hpctrain.models.weights import content, restore_complex
from hpctrain.report.find import CHECKPOINTS, checkpoint_steps
from hpctrain.report.record import FILE_NAME
from hpctrain.typed import from_fields

FORMAT = 1
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class CheckpointManifest:
    """The JSON file of a checkpoint."""

    format: int
    step: int
    file: str  # of the tensors, in the same folder
    bytes: int
    sha256: str
    state: dict[str, Any]
    check: str  # SHA-256 of all other fields


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that matches its checksums."""

    step: int
    state: dict[str, Any]
    path: Path

    def follows(self, epochs: float, validated: float) -> bool:
        """Whether its epoch and last validation are at most `epochs` and `validated`."""
        pairs = (self.state.get("epoch"), epochs), (self.state.get("validated"), validated)
        return all(not isinstance(value, int) or value <= most for value, most in pairs)

    def tensors(self) -> Tensors:
        """Read the tensors into host memory. Raises UsageError if they cannot be read."""
        try:
            with safe_open(self.path, "pt") as file:
                # Cloned: views of the mapped file would keep its space in use after its removal.
                names = file.keys()
                found = {name: file.get_tensor(name).clone() for name in names}
                return restore_complex(found, file.metadata() or {})
        except (OSError, SafetensorError, ValueError) as error:
            raise UsageError(f"checkpoint {self.path} cannot be read: {error}") from error


class Writer:
    """Writes checkpoints of one run in the background and keeps the newest few (rank 0)."""

    def __init__(self, folder: Path, interval: Interval, keep: int) -> None:
        self.folder, self.interval, self.keep = folder / CHECKPOINTS, interval, keep
        self._record = folder / FILE_NAME
        self._saved = time.monotonic()  # time of the last checkpoint
        self._last: tuple[int, dict[str, Any]] | None = None  # its step and state
        self.stall = 0.0  # longest time that a checkpoint blocked training, in seconds
        self.seconds = 0.0  # longest time that writing took
        self._host: Tensors = {}
        self._pool = ThreadPoolExecutor(1, "writer")
        self._task: Future[None] | None = None  # not yet checked for an error

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        """Wait until pending writes are complete, also after an error."""
        self._pool.shutdown()

    def overdue(self) -> bool:
        """Whether it is time to save. Raises RunError if an earlier write failed."""
        self.check()
        return time.monotonic() - self._saved >= self.interval.seconds

    def save(
        self, step: int, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]
    ) -> None:
        """Copy the tensors to host memory and write them in the background.

        Waits for the previous checkpoint first; raises RunError if writing it failed. Does nothing
        if the last checkpoint had the same step and state.
        """
        began = time.perf_counter()
        self.wait()  # the host copies are in use until then
        if self._last == (step, state):
            return
        for name, tensor in tensors.items():
            host = self._host.get(name)
            if host is None or (host.shape, host.dtype) != (tensor.shape, tensor.dtype):
                kind, pin = tensor.dtype, tensor.is_cuda
                host = self._host[name] = torch.empty(tensor.shape, dtype=kind, pin_memory=pin)
            host.copy_(tensor.detach())
        copies = {name: self._host[name] for name in tensors}
        own = copy.deepcopy(dict(state))
        self._last = step, own
        self.begin(lambda: self._write(step, own, copies))
        self._saved = time.monotonic()
        self.stall = max(self.stall, time.perf_counter() - began)

    def begin(self, write: Callable[[], None]) -> None:
        """Run `write` in the background after earlier writes. Raises RunError as `wait` does."""
        self.wait()
        self._task = self._pool.submit(self._run, write)

    def wait(self) -> None:
        """Wait until everything is written. Raises RunError if writing failed."""
        task, self._task = self._task, None
        if task and (error := task.exception()) is not None:
            reason = getattr(error, "strerror", None) or str(error)
            raise RunError(f"cannot write a checkpoint to {self.folder}: {reason}") from error

    def check(self) -> None:
        """Raise RunError if a finished write failed; does not wait."""
        if self._task and self._task.done():
            self.wait()

    def _run(self, write: Callable[[], None]) -> None:
        began = time.perf_counter()
        write()
        self.seconds = max(self.seconds, time.perf_counter() - began)

    def _write(self, step: int, state: dict[str, Any], tensors: Tensors) -> None:
        fault("checkpoint.begun")
        path = self.folder / f"{step:08}.safetensors"
        while path.exists():  # saved before
            path = path.with_stem(f"{path.stem}-2")
        with whole_file(path, point="checkpoint") as file:
            size, sha256 = 0, hashlib.sha256()
            for part in content(tensors, {}):
                size += file.write(part)
                sha256.update(part)
        sync(self._record)  # a step in the checkpoint must be in the record too
        with whole_file(_json(self.folder, step), point="manifest") as file:
            known = {"file": path.name, "bytes": size, "sha256": sha256.hexdigest()}
            described = {"format": FORMAT, "step": step, **known, "state": state}
            described["check"] = _check(described)
            file.write(json.dumps(described, indent=1).encode() + b"\n")
        for old in checkpoint_steps(self.folder)[: -self.keep]:
            _json(self.folder, old).unlink()
        _sweep(self.folder)


def make_ready(run: Path, step: int) -> None:
    """Prepare a run's folder for checkpoints. Raises OSError.

    Removes temporary files of killed writers, and checkpoints after `step`, which were skipped.
    """
    folder = run / CHECKPOINTS
    folder.mkdir(exist_ok=True)
    for stale in (*run.glob(".*.tmp"), *folder.glob(".*.tmp")):
        stale.unlink()
    for later in checkpoint_steps(folder):
        if later > step:
            _json(folder, later).unlink()
    _sweep(folder)


def _sweep(folder: Path) -> None:
    """Remove tensor files that no JSON file names."""
    named = set()
    for step in checkpoint_steps(folder):
        try:
            named.add(json.loads(_json(folder, step).read_text())["file"])
        except (OSError, ValueError, KeyError, TypeError):
            named.update(path.name for path in folder.glob(f"{step:08}*.safetensors"))
    for path in folder.glob("*.safetensors"):
        if path.name not in named:
            path.unlink()


def _json(folder: Path, step: int) -> Path:
    return folder / f"{step:08}.json"


class CorruptCheckpoint(UsageError):
    """A checkpoint whose files are damaged or missing."""


def newest(
    run: Path, recorded: int, epochs: float = math.inf, validated: float = math.inf
) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest intact checkpoint of a run, if any, and a line for each newer one skipped.

    A checkpoint is skipped if it is corrupt, or if it is ahead of the record, which ends at step
    `recorded`, after `epochs` epochs and the validation of step `validated`. Raises UsageError or
    RunError if one cannot be read but may be intact.
    """
    corrupt: list[str] = []
    beyond: list[Checkpoint] = []  # ahead of the record
    for step in reversed(checkpoint_steps(run / CHECKPOINTS)):
        try:
            found = verify(run, step)
        except CorruptCheckpoint as error:
            corrupt.append(f"{error}: passed over")
            continue
        if found.step <= recorded and found.follows(epochs, validated):
            passed = [
                f"the record ends at step {recorded}"
                + (", before the epoch or the validation was named" if c.step <= recorded else "")
                + f": the checkpoint of {c.step} is passed over"
                for c in beyond
            ]
            return found, corrupt + passed
        beyond.append(found)
    return next(iter(beyond), None), corrupt  # better a gap in the record than nothing


def verify(run: Path, step: int) -> Checkpoint:
    """Read one checkpoint of a run and compare it with its checksums.

    Raises CorruptCheckpoint with the reason, UsageError for a newer format, and RunError if it
    cannot be read.
    """
    described = _json(run / CHECKPOINTS, step)
    try:
        known = json.loads(described.read_bytes())
        if known["format"] > FORMAT:
            raise UsageError(
                f"{described} has format {known['format']}, this hpctrain knows {FORMAT}: use the"
                " hpctrain that wrote it"
            )
        manifest = from_fields(CheckpointManifest, known)
        path = described.with_name(manifest.file)
        if manifest.step != step or known.pop("check") != _check(known):
            raise CorruptCheckpoint(
                f"checkpoint {described} is corrupt: it does not match its own SHA-256"
            )
    except OSError as error:
        raise _unreadable(described, error) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpoint(f"checkpoint {described} is corrupt: {error}") from error
    try:
        found = path.stat().st_size
        if found != manifest.bytes:
            raise CorruptCheckpoint(f"checkpoint {path} has {found:,} bytes of {manifest.bytes:,}")
        if _sha256(path) != manifest.sha256:
            raise CorruptCheckpoint(
                f"checkpoint {path} is corrupt: its SHA-256 is not {manifest.sha256[:16]}..."
            )
    except FileNotFoundError as error:
        raise CorruptCheckpoint(f"checkpoint {path} is gone") from error
    except OSError as error:
        raise _unreadable(path, error) from error
    return Checkpoint(step, manifest.state, path)


def _unreadable(path: Path, error: OSError) -> RunError:
    return RunError(f"checkpoint {path} cannot be read: {error.strerror}; it may be whole")


def _check(described: dict[str, Any]) -> str:
    """Return the SHA-256 of the other fields of a JSON file."""
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
