"""``hpctrain sweep sweep.toml``: many networks at once, each an ordinary run of its own.

    hpctrain sweep sweep.toml --ranks-per-network 2 --slots 4
    srun and sbatch: within an allocation the networks are its steps; --slurm submits a job array

The driver uses neither MPI nor torch. What is in the file stands in file.py, what the sweep leaves
in folder.py, how it goes on in drive.py.
"""

from __future__ import annotations

import shlex
import subprocess
import time
from pathlib import Path

from rich.table import Table

from hpctrain import launch
from hpctrain.config import SweepConfig, as_words, check_imports, command_line
from hpctrain.errors import RunError, UsageError
from hpctrain.files import open_itself
from hpctrain.report.find import SWEEP_FILE, compared_by_accuracy
from hpctrain.sweep.array import submit
from hpctrain.sweep.drive import Driver, not_ended, read_rows
from hpctrain.sweep.file import Network, Networks, read_networks
from hpctrain.sweep.folder import choose_folder, make_folder, settings_file, sweep_file
from hpctrain.sweep.prune import Pruner, require_optuna
from hpctrain.sweep.results import FAILED, counts, write_results
from hpctrain.sweep.results import FILE as RESULTS
from hpctrain.sweep.show import Show
from hpctrain.sweep.slots import Machine, find_machine, python_program
from hpctrain.text import say
from hpctrain.training.control import STOP_FILE, RunLock

LOG = "sweep.log"  # of a driver in the background
ALIVE = 1.0  # seconds that it is watched
DRIVERS_OWN = ("file", "model", "name", "background", "progress")  # what one in the background has
PATIENCE = 60.0  # seconds to wait for others that write the results


def main(settings: SweepConfig) -> int:
    """Check everything, then launch; the exit code: 0 all done, 1 some failed, 75 to be resumed."""
    file, folder = sweep_file(settings)
    networks = read_networks(file)
    check_modes(settings)
    show = Show(settings.progress)
    there = folder is not None
    if folder is None:
        folder, there = choose_folder(settings, file, networks)
    if settings.results:
        if not there:
            raise UsageError(f"--results: there is no sweep {folder} yet")
        return collect(settings, folder, networks, show)
    wanted = any(network.config.device != "cpu" for network in networks.all)
    machine = None if settings.slurm else find_machine(settings, wanted)
    if settings.dry_run:
        preview(folder, networks, machine, show)
        return 0
    if file == folder / SWEEP_FILE or file.with_name(RESULTS).is_file():  # of another sweep
        allow_imports(settings, file, networks)
    left = not_ended(read_rows(folder, networks, settings.retry))
    if there and not left:
        show.line(f"{folder} has ended: {counts(_statuses(folder, networks))}")
        return 1 if FAILED in _statuses(folder, networks) else 0
    check_data(networks, settings.prune)
    lock = take_lock(folder, file, networks, settings)
    try:
        if settings.slurm:
            return submit_array(settings, folder, networks, left, show)
        if not settings.background:
            show.line(f"{folder}: {len(left)} of {len(networks.all)} networks to train")
            return drive(settings, folder, networks, machine, show)
    finally:
        lock.release()
    return detach(settings, folder, networks)


def check_modes(settings: SweepConfig) -> None:
    """Refuse what cannot go together. UsageError."""
    if settings.prune:
        require_optuna()
        if settings.slurm:
            raise UsageError("--prune needs a driver that watches: it cannot go with --slurm")
    if settings.slurm and settings.background:
        raise UsageError("--background and --slurm exclude each other: a job array has no driver")
    if settings.sbatch and not settings.slurm:
        raise UsageError("--sbatch goes with --slurm")


def allow_imports(settings: SweepConfig, file: Path, networks: Networks) -> None:
    """UsageError where a sweep's file names networks to import that --model does not."""
    named, who = networks.imported(), f"--model {settings.model}: " if settings.model else ""
    words = "sweep", *as_words(settings, without=("model",)), "--model", ",".join(named)
    allowed = (settings.model or "").split(",")
    check_imports(f"{who}{file}", named, allowed, f"type {command_line(*words)}")


def check_data(networks: Networks, prune: bool) -> None:
    """Find all data, make built-in sets that are missing. UsageError for what is no pack, and
    under --prune for packs without validation.
    """
    from hpctrain.data.builtin import locate
    from hpctrain.data.packed import read_pack

    named = {(n.config.data, n.config.data_dir, n.config.images) for n in networks.all}
    for data, data_dir, images in sorted(named, key=str):
        path = locate(data, data_dir)
        if images is None and "validation" not in read_pack(path).splits and prune:
            raise UsageError(f"--prune needs a split validation, and {path} has none")


def take_lock(folder: Path, file: Path, networks: Networks, settings: SweepConfig) -> RunLock:
    """Make the folder, and be the only driver in it. UsageError."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = RunLock()
    try:
        lock.take(folder)
    except UsageError as error:
        raise UsageError(
            f"the sweep {folder} is at work: hpctrain stop {folder} first, or choose another --name"
        ) from error
    make_folder(folder, file, networks, settings.runs_dir)
    return lock


def drive(
    settings: SweepConfig, folder: Path, networks: Networks, machine: Machine | None, show: Show
) -> int:
    """Launch the networks here and wait for them; the exit code."""
    assert machine is not None
    program = python_program()

    def command(network: Network) -> list[str]:
        return machine.command(settings_file(folder, network), network, program)

    accurate = compared_by_accuracy([network.config.task for network in networks.all])
    pruner = Pruner(accurate) if settings.prune else None
    driver = Driver(folder, networks, machine.slots, command, show, pruner, settings.retry)
    code = driver.run()
    show.results(list(driver.rows.values()))
    show.line(f"{folder}: {counts(row.status for row in driver.rows.values())}")
    return code


def submit_array(
    settings: SweepConfig, folder: Path, networks: Networks, left: list[str], show: Show
) -> int:
    """Submit the networks that are left as a job array."""
    (folder / STOP_FILE).unlink(missing_ok=True)
    chosen = [network for network in networks.all if network.name in left]
    job = submit(settings, folder, chosen)
    show.line(f"{folder}: {len(chosen)} networks are submitted as job {job}")
    name = shlex.quote(str(folder))
    show.line(f"results: hpctrain sweep {name} --results    stop: hpctrain stop {name}")
    return 0


def collect(settings: SweepConfig, folder: Path, networks: Networks, show: Show) -> int:
    """Write results.csv from the records; 1 where a network has failed."""
    lock, until = RunLock(), time.monotonic() + PATIENCE
    while True:
        try:
            lock.take(folder)
            break
        except UsageError:
            if time.monotonic() > until:
                raise UsageError(f"a driver works in {folder}: it tells the results") from None
            time.sleep(0.1)
    try:
        rows = read_rows(folder, networks, settings.retry)
        write_results(folder, networks, rows.values())
    finally:
        lock.release()
    show.results(list(rows.values()))
    return 1 if FAILED in [row.status for row in rows.values()] else 0


def detach(settings: SweepConfig, folder: Path, networks: Networks) -> int:
    """Go on in a session of its own, without this terminal. RunError where it ends at once."""
    words = [*python_program(), "sweep", str(folder), "--progress", "plain"]
    words += as_words(settings, without=DRIVERS_OWN)
    words += ["--model", ",".join(networks.imported())] if networks.imported() else []
    log = folder / LOG
    with open(log, "ab", opener=open_itself) as output:
        began = log.stat().st_size
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=launch.environment(),
            start_new_session=True,
        )
    try:
        code = process.wait(timeout=ALIVE)
    except subprocess.TimeoutExpired:
        code = 0
    if code:
        text = log.read_bytes()[began:].decode(errors="replace")
        raise RunError(f"the driver ended ({code}): {launch.last_words(text)}")
    say(f"{folder}: the driver is process {process.pid}")
    say(f"watch: tail -f {shlex.quote(str(log))}")
    stop = f"hpctrain stop {shlex.quote(str(folder))}"
    say(f"stop:  {stop}    or kill {process.pid}: save, to go on later")
    return 0


def preview(folder: Path, networks: Networks, machine: Machine | None, show: Show) -> None:
    """Print what would be done."""
    table = Table(pad_edge=False)
    for head in ("network", *networks.differing):
        table.add_column(head, overflow="fold")
    for network in networks.all:
        values = [getattr(network.config, name) for name in networks.differing]
        table.add_row(network.name, *("" if value is None else str(value) for value in values))
    show.console.print(table)
    if machine is None:
        show.line(f"{len(networks.all)} networks, one task each of a job array")
        return
    places = "; ".join(f"{slot.number}: {slot.place()}" for slot in machine.slots)
    where = "steps of the Slurm job" if machine.slurm else places
    show.line(f"{len(networks.all)} networks in {len(machine.slots)} slots ({where})")
    first = networks.all[0]
    line = machine.command(settings_file(folder, first), first, python_program())
    show.line("launch: " + shlex.join(line))


def _statuses(folder: Path, networks: Networks) -> list[str]:
    return [row.status for row in read_rows(folder, networks).values()]
