"""``hpctrain sweep sweep.toml``: train many networks side by side, each as an ordinary run.

    hpctrain sweep sweep.toml --ranks-per-network 2 --slots 4

The driver uses neither MPI nor torch. All its state is in the folder of the sweep, so a new driver
can replace one that was killed: done and failed networks are skipped, the others are launched again
and resume from their checkpoints. The folder has:

sweep.toml              a copy of the sweep's file; marks the folder as that of a sweep
01-lr=0.1.toml          the settings of a network, for train --config
01-lr=0.1.log           the output of its ranks
01-lr=0.1/              its run
results.csv             a line for each network, from the records of the runs

Only what is not in the records is read back from results.csv: that a network was killed.
"""

from __future__ import annotations

import csv
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rich.live import Live
from rich.table import Table

from hpctrain import launch
from hpctrain.cluster import LEFT, srun_words, tasks_by_node
from hpctrain.config import SweepConfig, require_trust, to_toml
from hpctrain.cores import allowed_cores, core_count
from hpctrain.errors import UsageError
from hpctrain.files import as_text, whole_file, write_whole, writing
from hpctrain.outcome import Outcome, Status
from hpctrain.report.console import make_console
from hpctrain.report.find import SWEEP_FILE, find_folder, ranked_runs
from hpctrain.report.history import History
from hpctrain.sweep.file import SweepNetwork, read_sweep
from hpctrain.text import ranges, say, short_number
from hpctrain.training.control import LOCK_FILE, STOP_FILE, RunLock, is_locked, request_stop

RESULTS_FILE = "results.csv"
FIGURES = ("best_validation_accuracy", "best_validation_loss", "test_accuracy", "test_loss")
FINAL = (Status.DONE, Status.FAILED)  # such networks are skipped by the same command
POLL_EVERY = 0.2  # seconds between checks of processes, records, locks and the STOP file


def main(settings: SweepConfig) -> int:
    """Check everything, then launch. Exit code 0: all done, 1: some failed, 75: to be resumed."""
    file, networks, folder = find_sweep(settings)
    trainings = read_trainings(folder, networks, settings.retry)
    left = [training for training in trainings if training.status not in FINAL]
    if settings.results and not folder.exists():
        raise UsageError(f"--results: there is no sweep {folder} yet")
    if settings.results and is_locked(folder):
        raise UsageError(f"the sweep {folder} is at work: it writes {RESULTS_FILE} itself")
    if not settings.dry_run and (settings.results or not left):
        return conclude(folder, trainings)
    slots = find_slots(settings, networks) if settings.dry_run or not settings.prepare else []
    if settings.dry_run:
        where = "; ".join(f"{slot.number}: {slot}" for slot in slots)
        command = shlex.join([*slots[0].command, f"{folder}/{networks[0].name}.toml"])
        say("\n".join(network.name for network in networks))
        say(f"{len(networks)} networks in {len(slots)} slots ({where})\nlaunch: {command}")
        return 0
    for network in networks:
        require_trust(vars(network.config), file, settings.trust_code)
    check_data(networks)
    lock = RunLock()
    folder.mkdir(parents=True, exist_ok=True)
    if not lock.take(folder):
        raise UsageError(f"the sweep {folder} is at work: stop it first, or choose another --run")
    try:
        write_settings(folder, file, networks, settings.runs_dir)
        say(f"{folder}: {len(left)} of {len(trainings)} networks to train")
        (folder / STOP_FILE).unlink(missing_ok=True)
        if not settings.prepare:
            return drive(folder, trainings, slots)
        numbers = ranges([training.network.number for training in left]).replace(" ", "")
        words = [str(folder), *["--trust-code"] * settings.trust_code]
        say(f"sbatch --array={numbers} slurm/sweep.sbatch {shlex.join(words)}")
        return 0
    finally:
        lock.release()


def find_sweep(settings: SweepConfig) -> tuple[Path, list[SweepNetwork], Path]:
    """Return the sweep's file, its networks, and its folder, which may not exist yet.

    The folder has the name given by --run, else that of the file, unless it was named in place of a
    file. Raises UsageError.
    """
    file, runs_dir = Path(settings.file), settings.runs_dir
    folder = Path(runs_dir) / (settings.run or file.stem)
    if file.name == SWEEP_FILE and file.resolve().parent.parent == Path(runs_dir).resolve():
        file = file.parent  # a sweep's own copy stands for it
    if not file.is_file():
        if file.suffix == ".toml":
            raise UsageError(f"there is no file {file}")
        named = find_folder(str(file), runs_dir)
        file, folder = named / SWEEP_FILE, folder if settings.run else named
    networks, copy = read_sweep(file), folder / SWEEP_FILE
    is_begun = copy.is_file() and copy.read_bytes() == file.read_bytes()
    if folder.exists() and not is_begun and not is_left_behind(folder, networks):
        raise UsageError(f"{folder} is no sweep of this {file}: choose another --run")
    return file, networks, folder


def is_left_behind(folder: Path, networks: list[SweepNetwork]) -> bool:
    """Whether the folder is all that was made of this sweep before the disk was full."""
    first = {LOCK_FILE, *(f"{network.name}.toml" for network in networks)}
    return folder.is_dir() and first >= set(os.listdir(folder))


def check_data(networks: list[SweepNetwork]) -> None:
    """Create built-in data sets that are missing. Raises UsageError if other data are no pack."""
    from hpctrain.data.pack import read_pack
    from hpctrain.packing.find import find_pack_path

    named = {(n.config.data, n.config.cache_dir, n.config.images) for n in networks}
    for data, cache_dir, images in sorted(named, key=str):
        path = find_pack_path(data, cache_dir)
        if images is None:
            read_pack(path)


def write_settings(folder: Path, file: Path, networks: list[SweepNetwork], runs_dir: str) -> None:
    """Write the files that the runs need; sweep.toml last, and only once. Raises RunError."""
    with writing(folder):
        for network in networks:
            own = {"run": network.name, "runs_dir": str(folder), "progress": "plain"}
            init = network.config.init
            if init is not None and (Path(runs_dir) / init).exists():  # the name of a run
                own["init"] = str(Path(runs_dir) / init)
            path, text = folder / f"{network.name}.toml", to_toml(network.config.changed() | own)
            if not path.exists() or path.read_text("utf-8") != text:
                write_whole(path, text)
        if not (folder / SWEEP_FILE).exists():
            write_whole(folder / SWEEP_FILE, file.read_bytes())


class Slot(NamedTuple):
    """A place for one network: cores and GPUs of this machine, or a job step of Slurm."""

    number: int  # 1, 2, ...
    command: list[str]  # launches a network: the path of its settings is appended
    cores: Sequence[int] = ()  # empty: all that this process may use
    gpus: Sequence[str] = ()

    def __str__(self) -> str:
        cores = f"cores {ranges(self.cores)}" if self.cores else "any core"
        return f"GPU {', '.join(self.gpus)}" if self.gpus else cores


def find_slots(settings: SweepConfig, networks: list[SweepNetwork]) -> list[Slot]:
    """Return as many slots as fit, or as requested. Raises UsageError.

    On this machine, they share GPUs or cores only if there are too few for one per slot.
    """
    ranks, inside = settings.ranks_per_network, "SLURM_JOB_ID" in os.environ
    trust = ["--trust-code"] * settings.trust_code
    train = [sys.executable, "-m", "hpctrain", "train", *trust, "--config"]
    if settings.launcher == "srun" and not inside:
        raise UsageError("--launcher srun: this is no Slurm job; --prepare is for job arrays")
    if inside and settings.launcher != "mpirun":
        words, count = step_words(ranks)
        return [Slot(n + 1, [*words, *train]) for n in range(settings.slots or count)]
    cores = sorted(allowed_cores())[: core_count()]  # a quota may allow fewer
    gpus = visible_gpus() if any(n.config.device != "cpu" for n in networks) else []
    count = settings.slots or max(1, len(gpus or cores) // ranks)
    if len(cores) < count:
        cores = []
    if 0 < len(gpus) < count:
        gpus = [gpus[n % len(gpus)] for n in range(count)]
    command = [launch.mpirun(), "-n", str(ranks), *train]

    def share(items: list, n: int) -> list:
        return items[len(items) * n // count : len(items) * (n + 1) // count]

    return [Slot(n + 1, command, share(cores, n), share(gpus, n)) for n in range(count)]


def visible_gpus() -> list[str]:
    """Return the names of the GPUs visible to CUDA programs; empty without a driver."""
    if (names := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in names.split(",") if name.strip() not in ("", "-1")]
    with suppress(OSError, subprocess.SubprocessError):
        query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
        return subprocess.check_output(query, text=True, timeout=30).split()
    return []


def step_words(ranks: int) -> tuple[list[str], int]:
    """Return the srun command of one network in this allocation, and how many such steps fit.

    Raises UsageError if not even one fits.
    """
    env = os.environ
    tasks = tasks_by_node(env.get("SLURM_TASKS_PER_NODE") or env.get("SLURM_NTASKS", "1"))
    if sum(tasks) < ranks:
        raise UsageError(f"--ranks-per-network {ranks}: the allocation has {sum(tasks)} tasks")
    fit = sum(count // ranks for count in tasks) if ranks <= max(tasks) else sum(tasks) // ranks
    nodes = math.ceil(ranks / max(tasks))
    words = [*srun_words(), "--exact", f"--nodes={nodes}", f"--ntasks={ranks}"]
    words.append("--kill-on-bad-exit=1")
    cores = env.get("SLURM_CPUS_PER_TASK") or env.get("SLURM_CPUS_PER_GPU", "1")
    words += [f"--mpi={env.get('HPCTRAIN_PMI', 'pmix')}", f"--cpus-per-task={cores}"]
    memory = env.get("SLURM_MEM_PER_NODE", "")
    if memory.isdigit() and int(memory):  # MiB; else one step takes it all and the others wait
        words.append(f"--mem={int(memory) * math.ceil(ranks / nodes) // max(tasks)}M")
    if any(name in env for name in ("SLURM_GPUS", "SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS")):
        # Not bound, each task sees all GPUs of its step on its node: NCCL copies between them.
        words += ["--gpus-per-task=1", "--gpu-bind=none"]
    return words, fit


class Training:
    """One network of a sweep: its status and its history, and its launch while it is trained."""

    def __init__(
        self, folder: Path, network: SweepNetwork, earlier: dict[str, str], retry: bool
    ) -> None:
        """`earlier` is the line of an earlier results.csv. The run is not running."""
        self.network = network
        self.run = folder / network.name
        self.log = Path(f"{self.run}.log")
        self.history = History.read(self.run, "none")
        self.outcome = self._recorded(earlier)
        if retry and self.outcome.status == Status.FAILED:
            self.outcome = Outcome(Status.UNFINISHED)

    @property
    def status(self) -> str:
        """The status of the network: one that has not ended is waiting, running or unfinished."""
        return self.outcome.status

    def _recorded(self, earlier: dict[str, str]) -> Outcome:
        """Return how the last launch ended, by the record of the run and by results.csv."""
        outcome = self.history.launch.outcome
        if outcome.status != Status.DONE and earlier.get("status") == Status.FAILED:
            return Outcome(Status.FAILED, earlier.get("reason"))
        if outcome.status in (Status.DONE, Status.FAILED, Status.STOPPED):
            return outcome
        status = Status.UNFINISHED if self.history.facts else Status.WAITING
        return Outcome(status, self.history.outcome().reason)

    def launch(self, slot: Slot, sessions: str) -> None:
        """Start the network in a slot. Raises RunError if it cannot be started."""
        (self.run / STOP_FILE).unlink(missing_ok=True)  # of an earlier sweep
        self.slot, self._log_start = slot, self.log.stat().st_size if self.log.exists() else 0
        own = {"CUDA_VISIBLE_DEVICES": ",".join(slot.gpus)} if slot.gpus else {}
        env = launch.environment({**launch.UNBOUND, **own, **launch.own_sessions(sessions)})
        command = [*slot.command, f"{self.run}.toml"]
        self.launched = launch.LaunchedRun(self.run, command, env, self.log, slot.cores)
        self.history = self.launched.history
        self.outcome = Outcome(Status.RUNNING)
        self.is_stopping = False

    def has_ended(self) -> bool:
        """Whether the process has ended; then the outcome is set, to unfinished if it left."""
        code = self.launched.process.poll()
        if code is None:
            return False
        (self.run / STOP_FILE).unlink(missing_ok=True)  # a request may have come too late
        self.outcome = self._outcome(code)
        if self.outcome.status == Status.FAILED:
            reason = f"{self.outcome.reason}{self.launched.memory_hint()}"
            self.outcome = self.outcome._replace(reason=reason)
        return True

    def _outcome(self, code: int) -> Outcome:
        """Return how the launch ended: by its record, else by its exit code and its output."""
        recorded = self.launched.outcome()
        last = self.history.launch.outcome  # of an earlier launch if this one recorded nothing
        if recorded.status == Status.DONE or (code == 0 and last.status == Status.DONE):
            return Outcome(Status.DONE, last.reason)
        if recorded.status == Status.STOPPED:
            return recorded
        if self.launched.is_notified or code == LEFT:  # it saved, was killed, or fails again
            return Outcome(Status.UNFINISHED, recorded.reason)
        if recorded.status == Status.FAILED and recorded.reason:
            return recorded
        if recorded.status != Status.FAILED:
            if code < 0:
                name = signal.Signals(-code).name
                return Outcome(Status.FAILED, f"ended by signal {-code} ({name})")
            if code == 0:
                return Outcome(Status.FAILED, "it ended without a record")
        output = self.log.read_bytes()[self._log_start :].decode(errors="replace")
        return Outcome(Status.FAILED, launch.last_error_line(output))

    def row(self) -> tuple[str, str, str]:
        """Return name, status and progress: "epoch 3 of 20, validation 0.9120, 12 s"."""
        history, epochs = self.history, self.history.facts.get("epochs")
        validation = history.best_validation()
        figures = {"training": history.training, "validation": validation, "test": history.test}
        texts = [f"epoch {history.completed} of {epochs}"] if epochs else []
        for split, metrics in figures.items():
            value = metrics.loss if metrics.accuracy is None else metrics.accuracy
            texts += [f"{split} {short_number(value)}"] if value is not None else []
        texts += [f"{history.seconds:.0f} s"] if epochs else []
        texts += filter(None, [self.outcome.reason])
        if self.status == Status.FAILED:
            texts.append(f"see {self.log}")
        return self.network.name, self.status, ", ".join(texts)


def read_trainings(folder: Path, networks: list[SweepNetwork], retry: bool) -> list[Training]:
    """Return all networks of a sweep. With `retry`, those that have failed are unfinished."""
    earlier: dict[str, dict[str, str]] = {}
    with (
        suppress(OSError, KeyError, ValueError, csv.Error),  # not there, or changed by others
        open(folder / RESULTS_FILE, newline="", encoding="utf-8-sig") as file,
    ):
        earlier = {row["name"]: row for row in csv.DictReader(file)}
    return [Training(folder, network, earlier.get(network.name, {}), retry) for network in networks]


def drive(folder: Path, trainings: list[Training], slots: list[Slot]) -> int:
    """Train until all networks have ended or the sweep must end. Return the exit code.

    On the first signal all networks are preempted; on a second Ctrl-C or SIGTERM they are killed.
    A STOP file in the folder of the sweep stops them.
    """
    running: list[Training] = []
    waiting = [training for training in trainings if training.status not in FINAL]
    ending = ""  # why no network begins any more: STOP, or what preempted the sweep
    sessions = tempfile.TemporaryDirectory(prefix="hpctrain-", ignore_cleanup_errors=True)
    # Not refreshed by a thread, because this process forks.
    live = Live(console=make_console(), auto_refresh=False, transient=True)
    with launch.caught_signals() as signals, sessions as place, live:
        while running or (waiting and not ending):
            before = ending
            if not ending and (folder / STOP_FILE).exists():
                ending = STOP_FILE
            if signals and ending in ("", STOP_FILE):
                ending = signals[0][0].name
            for training in [each for each in running if each.has_ended()]:
                running.remove(training)
                if training.status == Status.UNFINISHED and ending in ("", STOP_FILE):
                    ending = f"{training.network.name} was preempted: {training.outcome.reason}"
                write_results(folder, trainings)
                final = sum(each.status in FINAL for each in trainings)
                say(f"{'  '.join(training.row())}  ({final} of {len(trainings)})")
            if running and ending != before:
                how = "stop" if ending == STOP_FILE else "save and end; once more ends them at once"
                say(f"{ending}: the networks {how}")
            for training in running if ending else ():
                if ending != STOP_FILE:
                    training.launched.notify()
                elif training.run.is_dir() and not training.is_stopping:  # else it has just begun
                    training.is_stopping = True
                    request_stop(training.run)
            if launch.is_repeated(signals):
                launch.end(*(training.launched.process for training in running))
            used = [training.slot for training in running]
            free = [slot for slot in slots if slot not in used and not ending]
            unlocked = (t for t in [*waiting] if not (t.run.is_dir() and is_locked(t.run)))
            for slot, training in zip(free, unlocked, strict=False):
                waiting.remove(training)
                training.launch(slot, place)
                running.append(training)
                write_results(folder, trainings)
                say(f"{training.network.name} begins in slot {slot.number} ({slot})")
            for training in running:
                training.history.follow()
            places = [(f"slot {each.slot.number}", f"{each.slot}", *each.row()) for each in running]
            live.update(grid(places), refresh=True)
            time.sleep(POLL_EVERY)
    (folder / STOP_FILE).unlink(missing_ok=True)
    code = conclude(folder, trainings)
    if ending in ("", STOP_FILE):
        return code
    say(f"preempted ({ending}); the same command resumes")
    return LEFT


def write_results(folder: Path, trainings: list[Training]) -> None:
    """Write results.csv atomically. Raises RunError."""
    tables = [training.network.config.table() for training in trainings]
    names = [name for name in tables[0] if len({table[name] for table in tables}) > 1]
    header = ("name", "status", "reason", *names, *FIGURES, "epochs", "seconds")
    lines: list[Sequence[object]] = [header]
    for training, table in zip(trainings, tables, strict=True):
        line: list[object] = [training.network.name, training.status, training.outcome.reason]
        line += [table[name] for name in names]
        line += [*reversed(training.history.best_validation()), *reversed(training.history.test)]
        lines.append([*line, training.history.completed, round(training.history.seconds, 1)])
    path = folder / RESULTS_FILE
    with writing(path), whole_file(path) as binary, as_text(binary) as file:
        csv.writer(file).writerows(lines)


def conclude(folder: Path, trainings: list[Training]) -> int:
    """Write results.csv and print the networks, the best ones first.

    Return 1 if one has failed, else 0.
    """
    write_results(folder, trainings)
    by_run = {training.run: training for training in trainings}
    best = [by_run[run] for run, _ in ranked_runs(folder) if run in by_run]
    make_console().print(grid([each.row() for each in dict.fromkeys([*best, *trainings])]))
    counts = Counter(training.status for training in trainings)
    say(f"{folder}: {', '.join(f'{counts[status]} {status}' for status in sorted(counts))}")
    return int(Status.FAILED in counts)


def grid(rows: Sequence[Sequence[str]]) -> Table:
    """Return a table of these rows."""
    table = Table.grid(padding=(0, 2))
    for row in rows:
        table.add_row(*row)
    return table
