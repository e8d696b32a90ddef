"""``hpctrain sweep sweep.toml``: train many networks side by side, each as an ordinary run.

    hpctrain sweep sweep.toml --ranks-per-network 2 --slots 4

In a Slurm allocation, the networks are job steps. After --prepare, slurm/sweep.sbatch trains them
as the tasks of a job array, without a driver. The driver uses neither MPI nor torch. The file of a
sweep is described in file.py, its folder in folder.py, and how it is resumed in driver.py.
"""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path

from rich.table import Table

from hpctrain.config import SweepConfig, require_trust
from hpctrain.errors import UsageError
from hpctrain.sweep.display import SweepDisplay, counts
from hpctrain.sweep.driver import Driver
from hpctrain.sweep.file import Sweep, SweepNetwork, read_sweep
from hpctrain.sweep.folder import (
    FAILED,
    choose_folder,
    find_sweep_file,
    make_folder,
    read_results,
    write_csv,
)
from hpctrain.sweep.machine import Machine, find_machine
from hpctrain.text import ranges
from hpctrain.training.control import STOP_FILE, RunLock


def main(settings: SweepConfig) -> int:
    """Check everything, then launch. Exit code 0: all done, 1: some failed, 75: to be resumed."""
    file, folder = find_sweep_file(settings)
    sweep = read_sweep(file)
    display = SweepDisplay(settings.progress)
    folder = folder or choose_folder(settings, file, sweep)
    is_new = not folder.exists()
    if settings.results:
        if is_new:
            raise UsageError(f"--results: there is no sweep {folder} yet")
        return collect(settings, folder, sweep, display)
    machine = None  # --prepare may be called where nothing can be launched
    if settings.dry_run or not settings.prepare:
        wants_gpus = any(network.config.device != "cpu" for network in sweep.networks)
        machine = find_machine(settings, wants_gpus)
    if machine is not None and settings.dry_run:
        preview(folder, sweep, machine, display)
        return 0
    results = read_results(folder, sweep, settings.retry).values()
    left = [result.network for result in results if not result.is_final]
    if not is_new and not left:
        display.line(f"{folder} has ended: {counts(results)}")
        return int(any(result.status == FAILED for result in results))
    for network in sweep.networks:
        require_trust(vars(network.config), file, settings.trust_code)
    check_data(sweep)
    lock = take_lock(folder)
    try:
        make_folder(folder, file, sweep, settings.runs_dir)
        display.line(f"{folder}: {len(left)} of {len(sweep.networks)} networks to train")
        if machine is None:
            return prepare(settings, folder, left, display)
        return drive(settings, folder, sweep, machine, display)
    finally:
        lock.release()


def check_data(sweep: Sweep) -> None:
    """Check that all data exist; create built-in data sets that are missing.

    Raises UsageError if a file is not a pack.
    """
    from hpctrain.data.pack import read_pack
    from hpctrain.packing.builtin import locate

    named = {(n.config.data, n.config.cache_dir, n.config.images) for n in sweep.networks}
    for data, cache_dir, images in sorted(named, key=str):
        path = locate(data, cache_dir)
        if images is None:
            read_pack(path)


def take_lock(folder: Path) -> RunLock:
    """Create the folder and lock it. Raises UsageError if another driver holds the lock."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = RunLock()
    if not lock.take(folder):
        raise UsageError(
            f"the sweep {folder} is at work: hpctrain stop {folder} first, or choose another --run"
        )
    return lock


def drive(
    settings: SweepConfig, folder: Path, sweep: Sweep, machine: Machine, display: SweepDisplay
) -> int:
    """Launch the networks on this machine, wait for them, and return the exit code."""
    command = partial(machine.command, folder)
    driver = Driver(folder, sweep, machine.slots, command, display, settings.retry)
    code = driver.run()
    display.results(driver.results.values())
    display.line(f"{folder}: {counts(driver.results.values())}")
    return code


def prepare(
    settings: SweepConfig, folder: Path, networks: list[SweepNetwork], display: SweepDisplay
) -> int:
    """Print how to train these networks, which are left, as a job array that no request stops."""
    (folder / STOP_FILE).unlink(missing_ok=True)
    numbers = ranges([network.number for network in networks]).replace(" ", "")
    trust = " --trust-code" if settings.trust_code else ""
    display.line(f"sbatch --array={numbers} slurm/sweep.sbatch {shlex.quote(str(folder))}{trust}")
    return 0


def collect(settings: SweepConfig, folder: Path, sweep: Sweep, display: SweepDisplay) -> int:
    """Write results.csv from the records. Return 1 if a network has failed, else 0."""
    try:
        lock = take_lock(folder)
    except UsageError:
        raise UsageError(f"a driver works in {folder}: it writes the results") from None
    try:
        results = read_results(folder, sweep, settings.retry).values()
        write_csv(folder, sweep, results)
    finally:
        lock.release()
    display.results(results)
    return int(any(result.status == FAILED for result in results))


def preview(folder: Path, sweep: Sweep, machine: Machine, display: SweepDisplay) -> None:
    """Print the networks and slots without launching anything."""
    table = Table(pad_edge=False)
    for head in ("network", *sweep.differing):
        table.add_column(head, overflow="fold")
    for network in sweep.networks:
        values = [network.config.table()[name] for name in sweep.differing]
        table.add_row(network.name, *("" if value is None else str(value) for value in values))
    display.console.print(table)
    count = len(sweep.networks)
    slots = "; ".join(f"{slot.number}: {slot}" for slot in machine.slots)
    where = "steps of the Slurm job" if machine.slurm else slots
    display.line(f"{count} networks in {len(machine.slots)} slots ({where})")
    first = sweep.networks[0]
    display.line("launch: " + shlex.join(machine.command(folder, first)))
