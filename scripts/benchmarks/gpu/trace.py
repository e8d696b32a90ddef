"""Device operations of a step: reductions, copies to the host, waits for the device.

Kernels and copies are read from torch.profiler's trace in Chrome's format: events of the categories
kernel and gpu_memcpy, the latter with their bytes. NCCL with one rank sums in place by doing
nothing (ncclLaunchOneRank in its enqueue.cc). Then there is no kernel to count, so the calls are
counted as well.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from hpctrain.errors import first_line
from hpctrain.parallel.message import Report
from hpctrain.training.run import Run
from scripts.benchmarks.gpu.case import (
    Case,
    Result,
    attempt,
    first_batches,
    judged,
    made_pack,
    not_run,
    ready,
    shown,
)

STEPS, WARM = 5, 3
BATCH = 32
FEW_BYTES = 4096  # that may be copied to the host in a step: losses, counts, times


def measure(case: Case) -> Iterator[Result]:
    """Trace steps with NCCL; run steps in torch's sync debug mode, without and with NCCL."""
    nccl = ("--reduce", "nccl") if case.on_gpu else ()
    name = "NCCL" if case.on_gpu else "MPI in place of NCCL"
    yield from traced(case, nccl, name)
    for text, flags in (("no transport", ()), (name, nccl)):
        what = f"no step waits for the device, {text}"
        if not case.on_gpu:
            yield not_run(what, "torch's alarm for waits is CUDA's")
        else:
            yield attempt(what, unwaiting, case, flags)


def make_job(case: Case, flags: tuple[str, ...]) -> tuple[Run, Callable[[], Report]]:
    """Return a job, and a function that runs one step of it and copies its totals to the host.

    The training loop does the same.
    """
    shape = case.size((100, 100, 3), (28, 28, 1))
    words = ["--data", made_pack(case, BATCH, shape), "--batch-size", str(BATCH), *flags]
    job = ready(case, *words, "--model", case.size("resnet50", "digits"))
    (batches,) = first_batches(job)

    def step() -> Report:
        job.trainer.step(batches, BATCH)
        return job.trainer.message.report()

    for _ in range(WARM):
        step().totals()
    return job, step


def traced(case: Case, flags: tuple[str, ...], name: str) -> Iterator[Result]:
    """Yield the numbers of reductions, kernels and bytes copied to the host per step."""
    job, step = make_job(case, flags)
    calls = count_calls(job.trainer.reduce.transport, "allreduce")
    path = case.folder / "trace.json"
    events = profiled(lambda: step().totals(), path, case.on_gpu)
    what = f"reductions asked of {name} a step"
    yield shown(what, len(calls) == STEPS, f"{len(calls) / STEPS:g}", "1", n=STEPS)
    if case.rehearsal and case.on_gpu:
        yield not_run("kernels and copies a step", "only a real GPU has a profiler")
        return
    remark = "of one rank it launches none, of more it must be 1"
    of_nccl = kernels(events, "nccl") / STEPS
    yield judged("NCCL kernels a step", of_nccl, most=1, n=STEPS, remark=remark)
    # An empty trace would pass all checks: it must contain kernels and the copy of the totals.
    least = case.size(1, None)
    yield judged("all kernels a step (control)", kernels(events) / STEPS, least=least, n=STEPS)
    down = copied_bytes(events, "DtoH") / STEPS
    remark = f"of a message of {job.trainer.message.tensor.nbytes:,} bytes"
    what = "bytes to the host a step"
    yield judged(what, down, "bytes", least, FEW_BYTES, n=STEPS, remark=remark)


def count_calls(target: Any, name: str) -> list[int]:
    """Return a list that grows by one element with every call of this method of `target`."""
    method, calls = getattr(target, name), []

    def counted(*words: Any) -> Any:
        calls.append(1)
        return method(*words)

    setattr(target, name, counted)
    return calls


def profiled(step: Callable[[], object], path: Path, on_gpu: bool) -> list[dict[str, Any]]:
    """Return the events of a trace of STEPS steps."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if on_gpu:
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profile:
        for _ in range(STEPS):
            step()
        if on_gpu:
            torch.cuda.synchronize()
    profile.export_chrome_trace(str(path))
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def kernels(events: list[dict[str, Any]], name: str = "") -> int:
    """Return the number of kernels in a trace whose names contain `name`."""
    return sum(e.get("cat") == "kernel" and name in e["name"].lower() for e in events)


def copied_bytes(events: list[dict[str, Any]], way: str) -> int:
    """Return the bytes moved by the copies in a trace; `way` is DtoH, HtoD or DtoD."""
    copies = (e for e in events if e.get("cat") == "gpu_memcpy" and way in e["name"])
    return sum(int(copy["args"]["bytes"]) for copy in copies)


def unwaiting(what: str, case: Case, flags: tuple[str, ...]) -> Result:
    """Run steps while torch raises if an operation synchronizes; reading a number must raise."""
    job, step = make_job(case, flags)

    def steps() -> None:
        for _ in range(STEPS):
            step()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning that this mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            waits = alarm(steps)
            control = alarm(job.trainer.message.scalars.tolist)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found = waits or ("none" if control else "alarm silent")
    return shown(what, not waits and bool(control), found, "none", n=STEPS)


def alarm(work: Callable[[], object]) -> str:
    """Return torch's error for the first synchronization in `work`, or "" if there was none."""
    try:
        work()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return first_line(error)
    return ""
