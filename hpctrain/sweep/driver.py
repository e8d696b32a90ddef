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
import os
import shlex
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rich.live import Live
from rich.table import Table

from hpctrain import launch
from hpctrain.cluster import LEFT
from hpctrain.config import SweepConfig, require_trust, to_toml
from hpctrain.errors import UsageError
from hpctrain.files import as_text, whole_file, write_whole, writing
from hpctrain.outcome import Outcome, Status
from hpctrain.report.console import make_console
from hpctrain.report.find import SWEEP_FILE, find_folder, ranked_runs
from hpctrain.report.history import History
from hpctrain.sweep.file import SweepNetwork, read_sweep
from hpctrain.sweep.slots import Slot, find_slots
from hpctrain.tasks.facts import USUAL
from hpctrain.text import ranges, say, short_number
from hpctrain.training.control import LOCK_FILE, STOP_FILE, RunLock, is_locked, request_stop

RESULTS_FILE = "results.csv"
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
        return report_results(folder, trainings)
    slots: list[Slot] = []
    if settings.dry_run or not settings.prepare:
        slots = find_slots(settings, networks)
    if settings.dry_run:
        say_networks(folder, networks, slots)
        return 0
    for network in networks:
        require_trust(vars(network.config), file, settings.trust_code)
    make_missing_packs(networks)
    lock = RunLock()
    folder.mkdir(parents=True, exist_ok=True)
    if not lock.take(folder):
        raise UsageError(f"the sweep {folder} is at work: stop it first, or choose another --run")
    try:
        write_run_files(folder, file, networks, settings.runs_dir)
        say(f"{folder}: {len(left)} of {len(trainings)} networks to train")
        (folder / STOP_FILE).unlink(missing_ok=True)
        if not settings.prepare:
            return drive(folder, trainings, slots)
        numbers = ranges([training.network.number for training in left]).replace(" ", "")
        words = [str(folder)]
        if settings.trust_code:
            words.append("--trust-code")
        say(f"sbatch --array={numbers} slurm/sweep.sbatch {shlex.join(words)}")
        return 0
    finally:
        lock.release()


def say_networks(folder: Path, networks: list[SweepNetwork], slots: list[Slot]) -> None:
    """Print the networks, the slots, and the command that launches the first network."""
    where = "; ".join(f"{slot.number}: {slot}" for slot in slots)
    command = shlex.join([*slots[0].command, f"{folder}/{networks[0].name}.toml"])
    say("\n".join(network.name for network in networks))
    say(f"{len(networks)} networks in {len(slots)} slots ({where})\nlaunch: {command}")


def find_sweep(settings: SweepConfig) -> tuple[Path, list[SweepNetwork], Path]:
    """Return the sweep's file, its networks, and its folder, which may not exist yet.

    The folder has the name given by --run, else that of the file, unless it was named in place of a
    file. Raises UsageError.
    """
    file = Path(settings.file)
    runs_dir = Path(settings.runs_dir)
    folder = runs_dir / (settings.run or file.stem)
    if file.name == SWEEP_FILE and file.resolve().parent.parent == runs_dir.resolve():
        file = file.parent  # a sweep's own copy stands for it
    if not file.is_file():
        if file.suffix == ".toml":
            raise UsageError(f"there is no file {file}")
        named = find_folder(str(file), settings.runs_dir)
        file = named / SWEEP_FILE
        if not settings.run:
            folder = named
    networks = read_sweep(file)
    copy = folder / SWEEP_FILE
    is_begun = copy.is_file() and copy.read_bytes() == file.read_bytes()
    if folder.exists() and not is_begun and not is_left_behind(folder, networks):
        raise UsageError(f"{folder} is no sweep of this {file}: choose another --run")
    return file, networks, folder


def is_left_behind(folder: Path, networks: list[SweepNetwork]) -> bool:
    """Whether the folder is all that was made of this sweep before the disk was full."""
    first = {LOCK_FILE, *(f"{network.name}.toml" for network in networks)}
    return folder.is_dir() and first >= set(os.listdir(folder))


def make_missing_packs(networks: list[SweepNetwork]) -> None:
    """Create built-in data sets that are missing. Raises UsageError if other data are no pack."""
    from hpctrain.data.pack import read_pack
    from hpctrain.packing.find import find_pack_path

    sources = {
        (
            network.config.data,
            network.config.cache_dir,
            network.config.images,
            network.config.task,
        )
        for network in networks
    }
    for data, cache_dir, images, task in sorted(sources, key=str):
        path = find_pack_path(data, cache_dir, task)
        if images is None:
            read_pack(path)


def write_run_files(folder: Path, file: Path, networks: list[SweepNetwork], runs_dir: str) -> None:
    """Write the files that the runs need; sweep.toml last, and only once. Raises RunError."""
    with writing(folder):
        for network in networks:
            settings = network.config.changed() | {
                "run": network.name,
                "runs_dir": str(folder),
                "progress": "plain",
            }
            init = network.config.init
            if init is not None and (Path(runs_dir) / init).exists():  # the name of a run
                settings["init"] = str(Path(runs_dir) / init)
            path = folder / f"{network.name}.toml"
            text = to_toml(settings)
            if not path.exists() or path.read_text("utf-8") != text:
                write_whole(path, text)
        if not (folder / SWEEP_FILE).exists():
            write_whole(folder / SWEEP_FILE, file.read_bytes())


class Training:
    """One network of a sweep: its status and its history, and its launch while it is trained."""

    def __init__(
        self,
        folder: Path,
        network: SweepNetwork,
        earlier: dict[str, str],
        retry: bool,
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
        self.slot = slot
        self._log_start = 0  # where the output of this launch begins
        if self.log.exists():
            self._log_start = self.log.stat().st_size
        variables = {**launch.UNBOUND, **launch.own_sessions(sessions)}
        if slot.gpus:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(slot.gpus)
        self.launched = launch.LaunchedRun(
            folder=self.run,
            command=[*slot.command, f"{self.run}.toml"],
            env=launch.environment(variables),
            log=self.log,
            cores=slot.cores,
        )
        self.history = self.launched.history
        self.outcome = Outcome(Status.RUNNING)
        self._is_stopping = False

    def stop(self) -> None:
        """Ask the network to stop after its next step, once."""
        if not self._is_stopping:
            self._is_stopping = True
            request_stop(self.run)

    def is_locked(self) -> bool:
        """Whether another process works in the folder of the run."""
        return self.run.is_dir() and is_locked(self.run)

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
        return Outcome(Status.FAILED, self._why_failed(code, recorded))

    def _why_failed(self, code: int, recorded: Outcome) -> str:
        if recorded.status == Status.FAILED and recorded.reason:
            return recorded.reason
        if recorded.status != Status.FAILED:
            if code < 0:
                return f"ended by signal {-code} ({signal.Signals(-code).name})"
            if code == 0:
                return "it ended without a record"
        output = self.log.read_bytes()[self._log_start :].decode(errors="replace")
        return launch.last_error_line(output)

    def row(self) -> tuple[str, str, str]:
        """Return name, status and progress: "epoch 3 of 20, validation 0.9120, 12 s"."""
        history = self.history
        epochs = history.facts.get("epochs")
        figures = {
            "training": history.training,
            "validation": history.best_validation(),
            "test": history.test,
        }
        ranking = next(iter(history.figures), "loss")  # training may lack it
        texts: list[str] = []
        if epochs:
            texts.append(f"epoch {history.completed} of {epochs}")
        for split, metrics in figures.items():
            figure = metrics.first_known
            if figure.value is None:
                continue
            label = split
            if figure.name != ranking:
                label = f"{split} {figure.name}"
            texts.append(f"{label} {short_number(figure.value)}")
        if epochs:
            texts.append(f"{history.seconds:.0f} s")
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


class Driver:
    """The networks of a sweep: those in training in its slots, and those that wait."""

    def __init__(
        self,
        folder: Path,
        trainings: list[Training],
        slots: list[Slot],
        sessions: str,
    ) -> None:
        """`sessions` is a folder for the sockets of launchers."""
        self.folder = folder
        self.trainings = trainings
        self.slots = slots
        self.running: list[Training] = []
        self.waiting = [training for training in trainings if training.status not in FINAL]
        self.ending = ""  # why no network begins any more: STOP, or what preempted the sweep
        self._sessions = sessions

    @property
    def is_at_work(self) -> bool:
        """Whether a network is in training, or one that waits may begin."""
        return bool(self.running or (self.waiting and not self.ending))

    @property
    def is_preempted(self) -> bool:
        """Whether the sweep ends for another reason than a STOP file."""
        return self.ending not in ("", STOP_FILE)

    def look_for_end(self, signals: launch.ReceivedSignals) -> None:
        """Let the sweep end if there is a STOP file or a signal."""
        if not self.ending and (self.folder / STOP_FILE).exists():
            self.ending = STOP_FILE
        if signals and not self.is_preempted:
            self.ending = signals[0][0].name

    def remove_ended(self) -> None:
        """Print the networks that have ended; a network that was preempted ends the sweep."""
        for training in [training for training in self.running if training.has_ended()]:
            self.running.remove(training)
            if training.status == Status.UNFINISHED and not self.is_preempted:
                self.ending = f"{training.network.name} was preempted: {training.outcome.reason}"
            write_results(self.folder, self.trainings)
            final = sum(training.status in FINAL for training in self.trainings)
            say(f"{'  '.join(training.row())}  ({final} of {len(self.trainings)})")

    def end_running(self) -> None:
        """Ask the networks in training to stop, or to save and end, if the sweep ends."""
        for training in self.running:
            if self.is_preempted:
                training.launched.notify()
            elif self.ending and training.run.is_dir():  # else it has just begun
                training.stop()

    def begin_waiting(self) -> None:
        """Launch networks that wait, and are not locked by others, in the slots that are free."""
        if self.ending:
            return
        used = [training.slot for training in self.running]
        free = [slot for slot in self.slots if slot not in used]
        unlocked = (training for training in [*self.waiting] if not training.is_locked())
        for slot, training in zip(free, unlocked, strict=False):
            self.waiting.remove(training)
            training.launch(slot, self._sessions)
            self.running.append(training)
            write_results(self.folder, self.trainings)
            say(f"{training.network.name} begins in slot {slot.number} ({slot})")

    def rows(self) -> list[tuple[str, ...]]:
        """Return the rows of a table of the networks in training."""
        for training in self.running:
            training.history.follow()
        return [
            (
                f"slot {training.slot.number}",
                str(training.slot),
                *training.row(),
            )
            for training in self.running
        ]


def drive(folder: Path, trainings: list[Training], slots: list[Slot]) -> int:
    """Train until all networks have ended or the sweep must end. Return the exit code.

    On the first signal all networks are preempted; on a second Ctrl-C or SIGTERM they are killed.
    A STOP file in the folder of the sweep stops them.
    """
    temporary = tempfile.TemporaryDirectory(prefix="hpctrain-", ignore_cleanup_errors=True)
    # Not refreshed by a thread, because this process forks.
    live = Live(console=make_console(), auto_refresh=False, transient=True)
    with launch.caught_signals() as signals, temporary as sessions, live:
        driver = Driver(folder, trainings, slots, sessions)
        while driver.is_at_work:
            before = driver.ending
            driver.look_for_end(signals)
            driver.remove_ended()
            if driver.running and driver.ending != before:
                how = "save and end; once more ends them at once" if driver.is_preempted else "stop"
                say(f"{driver.ending}: the networks {how}")
            driver.end_running()
            if launch.is_repeated(signals):
                launch.end(*(training.launched.process for training in driver.running))
            driver.begin_waiting()
            live.update(grid(driver.rows()), refresh=True)
            time.sleep(POLL_EVERY)
    (folder / STOP_FILE).unlink(missing_ok=True)
    code = report_results(folder, trainings)
    if not driver.is_preempted:
        return code
    say(f"preempted ({driver.ending}); the same command resumes")
    return LEFT


def write_results(folder: Path, trainings: list[Training]) -> None:
    """Write results.csv atomically. Raises RunError."""
    tables = [training.network.config.table() for training in trainings]
    names = [name for name in tables[0] if len({str(table[name]) for table in tables}) > 1]
    figures = [*USUAL.figures]
    for training in trainings:
        figures += [name for name in training.history.figures if name not in figures]
    header = (
        "name",
        "status",
        "reason",
        *names,
        *(f"best_validation_{name}" for name in figures),
        *(f"test_{name}" for name in figures),
        "epochs",
        "seconds",
    )
    lines: list[Sequence[object]] = [header]
    for training, table in zip(trainings, tables, strict=True):
        history = training.history
        best = history.best_validation()
        line = (
            training.network.name,
            training.status,
            training.outcome.reason,
            *(in_one_cell(table[name]) for name in names),
            *(best[name].value for name in figures),
            *(history.test[name].value for name in figures),
            history.completed,
            round(history.seconds, 1),
        )
        lines.append(line)
    path = folder / RESULTS_FILE
    with writing(path), whole_file(path) as binary, as_text(binary) as file:
        csv.writer(file).writerows(lines)


def in_one_cell(value: object) -> object:
    """Return the value of a setting for a cell of results.csv; several texts in one."""
    if isinstance(value, list):
        return " + ".join(value)
    return value


def report_results(folder: Path, trainings: list[Training]) -> int:
    """Write results.csv and print the networks, the best ones first.

    Return 1 if one has failed, else 0.
    """
    write_results(folder, trainings)
    by_run = {training.run: training for training in trainings}
    best = [by_run[run] for run, _ in ranked_runs(folder) if run in by_run]
    ordered = dict.fromkeys([*best, *trainings])
    make_console().print(grid([training.row() for training in ordered]))
    counts = Counter(training.status for training in trainings)
    say(f"{folder}: {', '.join(f'{counts[status]} {status}' for status in sorted(counts))}")
    return int(Status.FAILED in counts)


def grid(rows: Sequence[Sequence[str]]) -> Table:
    """Return a table of these rows."""
    table = Table.grid(padding=(0, 2))
    for row in rows:
        table.add_row(*row)
    return table
