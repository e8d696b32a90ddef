"""The workers of ``pack``, from the parent's side: hand out tasks, collect answers.

Worker processes are plain child processes over pipes rather than multiprocessing's: nothing of the
program that packs is imported in them again, they may be started where MPI is running (nothing is
forked without exec), and they end when this process does. Where a launcher started several
processes, each decodes in threads of its own: Pillow releases the interpreter's lock.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpctrain.data.packing.worker import Task, decode_task, quiet, run_task
from hpctrain.errors import RunError

Answer = list[list[Any]]
Run = Callable[[Iterable[Task]], Iterator[Answer]]
PACKAGES = str(Path(__file__).resolve().parents[3])  # the folder that holds hpctrain
CHILD_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@contextmanager
def workers(jobs: int, files: list[int]) -> Iterator[Run]:
    """Start `jobs` processes that inherit the open `files`; gives a function that runs tasks.

    That function yields the answers in the order of the tasks, a few tasks ahead of the caller.
    It raises RunError where a process dies, OSError where the disk is full. One job needs no
    process.
    """
    if jobs == 1:
        yield lambda tasks: map(run_task, tasks)
        return
    processes = [_start(files) for _ in range(jobs)]
    idle: queue.SimpleQueue[subprocess.Popen[str]] = queue.SimpleQueue()
    for process in processes:
        idle.put(process)

    def run_one(task: Task) -> Answer:
        process = idle.get()
        try:
            return _ask(process, task)
        finally:
            idle.put(process)

    threads = ThreadPoolExecutor(jobs)
    try:
        yield lambda tasks: _in_order(threads, run_one, tasks, 3 * jobs)
    finally:
        for process in processes:
            process.kill()  # the answers are in, or no longer wanted
        threads.shutdown(cancel_futures=True)
        for process in processes:
            process.communicate()


@contextmanager
def worker_threads(jobs: int) -> Iterator[Run]:
    """The same as `workers`, in `jobs` threads of this process."""
    if jobs == 1:
        yield lambda tasks: map(run_task, tasks)
        return
    with quiet(), ThreadPoolExecutor(jobs) as threads:
        try:
            yield lambda tasks: _in_order(threads, decode_task, tasks, 3 * jobs)
        finally:
            threads.shutdown(cancel_futures=True)


def _in_order(
    threads: ThreadPoolExecutor,
    run_one: Callable[[Task], Answer],
    tasks: Iterable[Task],
    ahead: int,
) -> Iterator[Answer]:
    waiting: deque[Future[Answer]] = deque()
    for task in tasks:
        waiting.append(threads.submit(run_one, task))
        if len(waiting) >= ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _start(files: list[int]) -> subprocess.Popen[str]:
    paths = [PACKAGES, os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, **CHILD_ENVIRONMENT}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return subprocess.Popen(
        [sys.executable, "-m", "hpctrain.data.packing.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=files,
        process_group=0,  # a Ctrl-C is for this process to act on
        env=environment,
        encoding="ascii",
    )


def _ask(process: subprocess.Popen[str], task: Task) -> Answer:
    assert process.stdin and process.stdout  # pipes were asked for
    try:
        print(json.dumps(task._asdict()), file=process.stdin, flush=True)
        line = process.stdout.readline()
    except (BrokenPipeError, ValueError):
        line = ""
    if not line:
        names = [image[1] for image in task.images]
        code = process.wait()
        cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        raise RunError(
            f"a worker process of pack ended ({cause}) on one of {names[0]} to {names[-1]}; if"
            " memory ran out, use fewer --jobs"
        )
    answer = json.loads(line)
    if "errno" in answer:
        raise OSError(answer["errno"], answer["text"])
    if "traceback" in answer:
        raise RuntimeError("in a worker process:\n" + answer["traceback"])
    return answer["images"]
