"""Atomic checkpoints: all that a run needs to resume.

    checkpoints/00000123.safetensors    tensors
    checkpoints/00000123.json           everything else, with name, size and SHA-256 of the tensors

A pair counts once the JSON is there, which is written last; each file gets its name by rename(2)
after fsync(2). A step that is saved again writes its tensors under another name, so that the JSON
that is there stays true until it is replaced. A pair that does not match its checksum is
skipped, and the one before is used; one that cannot be read for another reason (a file system that
is not mounted, a newer format) ends the launch, because it may be intact. Reading executes nothing
(safetensors and JSON, no pickle).
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import re
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
from hpctrain.files import sync, whole_file
from hpctrain.models.weights import content, restore_complex
from hpctrain.report.record import FILE_NAME
from hpctrain.typed import from_fields

FOLDER = "checkpoints"
FORMAT = 1
LIBRARY_TEMPORARY = ".tmp" + 6 * "[0-9A-Za-z]"  # of safetensors' writer, which was used before
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
    check: str  # SHA-256 of all the others


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was found whole."""

    step: int
    state: dict[str, Any]
    path: Path

    def follows(self, epochs: float, validated: float) -> bool:
        """Whether it holds no more epochs, and no later validation, than these."""
        pairs = (self.state.get("epoch"), epochs), (self.state.get("validated"), validated)
        return all(not isinstance(value, int) or value <= most for value, most in pairs)

    def tensors(self) -> Tensors:
        """Read the tensors, onto the CPU. UsageError."""
        try:
            with safe_open(self.path, "pt") as file:
                # Copies: what it gives is the mapped file, which cleaning up could not free.
                names = file.keys()
                found = {name: file.get_tensor(name).clone() for name in names}
                return restore_complex(found, file.metadata() or {})
        except (OSError, SafetensorError, ValueError) as error:
            raise UsageError(f"checkpoint {self.path} cannot be read: {error}") from error


class Writer:
    """Writes checkpoints of one run in the background and keeps the newest few (rank 0)."""

    def __init__(self, folder: Path, interval: Interval, keep: int) -> None:
        self.folder, self.interval, self.keep = folder / FOLDER, interval, keep
        self._record = folder / FILE_NAME
        self._saved = time.monotonic()  # when the last one was taken
        self._last: tuple[int, dict[str, Any]] | None = None  # its step and state
        self.stall = 0.0  # seconds for which a checkpoint held up training, at most
        self.seconds = 0.0  # that writing took, at most
        self._host: Tensors = {}
        self._pool = ThreadPoolExecutor(1, "writer")
        self._task: Future[None] | None = None  # whose end was not looked at yet

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        """What is being written is written to its end, whatever happened."""
        self._pool.shutdown()

    def overdue(self) -> bool:
        """Whether it is time to save. RunError where something could not be written."""
        self.check()
        return time.monotonic() - self._saved >= self.interval.seconds

    def save(
        self, step: int, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]
    ) -> None:
        """Copy the tensors to host memory and write them behind training's back.

        Waits for the checkpoint before this one to be written. RunError where that failed. Does
        nothing where the last one was the same.
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
        """Run `write` in the background, once nothing else is being written. RunError as `wait`."""
        self.wait()
        self._task = self._pool.submit(self._run, write)

    def wait(self) -> None:
        """Return when nothing is left to write. RunError where writing failed."""
        task, self._task = self._task, None
        if task and (error := task.exception()) is not None:
            reason = getattr(error, "strerror", None) or str(error)
            raise RunError(f"cannot write a checkpoint to {self.folder}: {reason}") from error

    def check(self) -> None:
        """RunError if something could not be written; does not wait."""
        if self._task and self._task.done():
            self.wait()

    def _run(self, write: Callable[[], None]) -> None:
        began = time.perf_counter()
        write()
        self.seconds = max(self.seconds, time.perf_counter() - began)

    def _write(self, step: int, state: dict[str, Any], tensors: Tensors) -> None:
        path = self.folder / f"{step:08}.safetensors"
        while path.exists():  # saved before
            path = path.with_stem(f"{path.stem}-2")
        with whole_file(path) as file:
            size, sha256 = 0, hashlib.sha256()
            for part in content(tensors, {}):
                size += file.write(part)
                sha256.update(part)
        sync(self._record)  # a step that is in the checkpoint is in the record too
        with whole_file(_json(self.folder, step)) as file:
            known = {"file": path.name, "bytes": size, "sha256": sha256.hexdigest()}
            described = {"format": FORMAT, "step": step, **known, "state": state}
            described["check"] = _check(described)
            file.write(json.dumps(described, indent=1).encode() + b"\n")
        for old in steps(self.folder)[: -self.keep]:
            _json(self.folder, old).unlink()
        _sweep(self.folder)


def make_ready(run: Path, step: int) -> None:
    """Make a run's folder for checkpoints, without what killed writers left and without those of
    later steps than `step`: they were passed over. OSError.
    """
    (run / FOLDER).mkdir(exist_ok=True)
    hidden = ((run, ".*.tmp"), (run / FOLDER, ".*.tmp"), (run / FOLDER, LIBRARY_TEMPORARY))
    for stale in (path for folder, names in hidden for path in folder.glob(names)):
        stale.unlink()
    for later in steps(run / FOLDER):
        if later > step:
            _json(run / FOLDER, later).unlink()
    _sweep(run / FOLDER)


def _sweep(folder: Path) -> None:
    """Remove tensors that no JSON file names."""
    named = set()
    for step in steps(folder):
        try:
            named.add(json.loads(_json(folder, step).read_text())["file"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            named.update(path.name for path in folder.glob(f"{step:08}*.safetensors"))
    for path in folder.glob("*.safetensors"):
        if path.name not in named:
            path.unlink()


def _json(folder: Path, step: int) -> Path:
    return folder / f"{step:08}.json"


def steps(folder: Path) -> list[int]:
    """The steps of which there are checkpoints, whole or not, in order."""
    names = [path.name for path in folder.glob("*.json")] if folder.is_dir() else []
    return sorted(int(found[1]) for name in names if (found := re.fullmatch(r"(\d+)\.json", name)))


class CorruptCheckpoint(UsageError):
    """A checkpoint that is not what was written."""


def newest(
    run: Path, recorded: int, epochs: float = math.inf, validated: float = math.inf
) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint of a run, if there is one; and a line for each newer one that is
    passed over: corrupt, or of what the record has lost, which ends at step `recorded`, after so
    many `epochs` and the validation of step `validated`.

    UsageError or RunError where one cannot be read but may be whole.
    """
    corrupt: list[str] = []
    beyond: list[Checkpoint] = []  # the record
    for step in reversed(steps(run / FOLDER)):
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
    """One checkpoint of a run, compared with its checksums. CorruptCheckpoint with what is
    wrong; UsageError for a newer format, RunError where it cannot be read.
    """
    described = _json(run / FOLDER, step)
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
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
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
    """SHA-256 of the other fields of a JSON file."""
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
