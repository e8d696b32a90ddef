"""Run the tasks of ``pack`` in a process pool.

An image that crashes a decoder ends only a worker and is reported. Workers are spawned, not forked,
and the kernel ends them when their parent dies. One job is a thread of this process.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, TypeVar

from hpctrain.data.packing.decode import current_image
from hpctrain.errors import RunError
from hpctrain.launcher import PR_SET_PDEATHSIG

T = TypeVar("T")
NAME_BYTES = 1024  # shared by each worker process, for the name of its current image
LEFT_TO_PARENT = (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)  # Slurm sends them to all
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
JOIN = 5.0  # seconds to wait for the exit codes of worker processes


class PackTask(NamedTuple):
    """The arguments of a function, and the number of images that it processes."""

    arguments: tuple[Any, ...]
    images: int


RunTasks = Callable[[str, Callable[..., Any], Iterable[PackTask], int], Iterator[Any]]


class TaskRunner:
    """Runs tasks with an executor, a few ahead; results are in the order of the tasks."""

    def __init__(self, jobs: int, executor: Executor) -> None:
        self._jobs, self._executor = jobs, executor

    def run(
        self,
        function: Callable[..., T],
        tasks: Iterable[PackTask],
        advance: Callable[[int], None],
    ) -> Iterator[T]:
        """Yield the results; call `advance` with the images of each. Errors are raised here."""
        waiting: deque[tuple[Future[T], int]] = deque()
        for task in tasks:
            waiting.append((self._submit(function, task.arguments), task.images))
            while len(waiting) >= 3 * self._jobs:
                yield self._result(*waiting.popleft(), advance)
        while waiting:
            yield self._result(*waiting.popleft(), advance)

    def _submit(self, function: Callable[..., T], arguments: tuple[Any, ...]) -> Future[T]:
        return self._executor.submit(function, *arguments)

    def _result(self, future: Future[T], images: int, advance: Callable[[int], None]) -> T:
        result = future.result()
        advance(images)
        return result


class ProcessRunner(TaskRunner):
    """Runs tasks in worker processes. Raises RunError if one dies."""

    def __init__(self, jobs: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._names = context.RawArray("c", jobs * NAME_BYTES)
        number, self._others = context.Value("i", 0), {*multiprocessing.active_children()}
        given = self._names, number, os.getpid()
        super().__init__(jobs, ProcessPoolExecutor(jobs, context, _begin, given))
        self._workers: set[BaseProcess] = set()

    def _submit(self, function: Callable[..., T], arguments: tuple[Any, ...]) -> Future[T]:
        """Submit a task; a process started for it inherits a signal mask and thread limits."""
        if len(self._workers) == self._jobs:
            return super()._submit(function, arguments)
        before = {name: os.environ.get(name) for name in ONE_THREAD}
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_PARENT)
        os.environ.update(ONE_THREAD)
        try:
            return super()._submit(function, arguments)
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            self._workers.update({*multiprocessing.active_children()} - self._others)

    def _result(self, future: Future[T], images: int, advance: Callable[[int], None]) -> T:
        try:
            return super()._result(future, images, advance)
        except BrokenProcessPool:
            raise RunError(self._cause()) from None

    def _cause(self) -> str:
        """Return a message about the worker process that died."""
        deadline = time.monotonic() + JOIN  # the executor joins them in another thread
        while any(w.exitcode is None for w in self._workers) and time.monotonic() < deadline:
            time.sleep(0.01)
        names = self._names.raw
        shown = (names[at : at + NAME_BYTES] for at in range(0, len(names), NAME_BYTES))
        images = dict(text.partition(b"\0")[0].partition(b" ")[::2] for text in shown)
        for worker in self._workers:
            code = worker.exitcode or 0
            if code in (0, -signal.SIGTERM):  # sent by the executor to all others
                continue
            cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            image = images.get(str(worker.pid).encode(), b"").decode("utf-8", "surrogateescape")
            where = f"while it decoded {image}" if image else "before its first image"
            memory = "; if memory ran out, use fewer --jobs" if code == -signal.SIGKILL else ""
            return f"a worker process of pack was ended by {cause} {where}{memory}"
        return "a worker process of pack ended too early"

    def close(self) -> None:
        """End the worker processes, whose results have been received or are no longer needed."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.kill()


@contextmanager
def _start_thread() -> Iterator[TaskRunner]:
    with warnings.catch_warnings(), ThreadPoolExecutor(1) as thread:
        warnings.simplefilter("ignore")  # from Pillow, about unusual metadata
        try:
            yield TaskRunner(1, thread)
        finally:
            thread.shutdown(cancel_futures=True)


@contextmanager
def start_workers(jobs: int) -> Iterator[RunTasks]:
    """Yield a function that runs tasks in `jobs` processes, or for one job in a thread.

    Its arguments are a text for the progress bar, a function, the tasks and their number of images;
    it yields the results in the order of the tasks.
    """
    from hpctrain.data.packing import report  # imports rich, which a worker need not

    kind = _start_thread() if jobs == 1 else closing(ProcessRunner(jobs))
    with kind as runner:

        def run_tasks(
            what: str, function: Callable[..., Any], tasks: Iterable[PackTask], images: int
        ) -> Iterator[Any]:
            with report.progress(what, images) as advance:
                yield from runner.run(function, tasks, advance)

        yield run_tasks


def _begin(names: Any, number: Any, parent: int) -> None:
    """Initialise a worker process."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the parent has already died
    warnings.simplefilter("ignore")
    with number.get_lock():
        start = number.value * NAME_BYTES
        number.value += 1
    place = memoryview(names).cast("B")[start : start + NAME_BYTES]
    own = f"{os.getpid()} ".encode()
    place[: len(own)] = own
    current_image.append(place[len(own) :])
