"""Begin a subcommand on all ranks: watched, announced, and with one account of a mistake.

Ranks of one launch know of each other before MPI runs by the files that they leave in a folder
named by the launch. So a rank that is missing in MPI_Init can be named.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import socket
import stat
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpctrain.config import Config, PackConfig, duration
from hpctrain.errors import Failure, UsageError
from hpctrain.heartbeats import Turn, is_gone, read_beats
from hpctrain.launcher import launch_name, launched_rank, launched_size, local_size
from hpctrain.text import say
from hpctrain.watchdog import Watchdog

FOLDER = ".hpctrain-ranks-"  # and the name of the launch
OLD = 3600.0  # seconds without a heartbeat after which such a folder was left behind


def start(name: str, module: str, settings: Any = None, failure: Failure | None = None) -> int:
    """Run a module's `main` on all ranks; the exit code. An error on one rank, in its imports too,
    ends all. Where the command line was wrong, `failure` says how: the ranks agree on it.
    """
    rank, size = launched_rank(), launched_size() or 1
    timeout = duration(getattr(settings, "timeout", Config.timeout), "--timeout")
    with Watchdog(rank, size, socket.gethostname(), timeout, whole=True) as watchdog:
        watchdog.doing("importing MPI")
        if size > 1 and failure is None:
            meet(watchdog, settings)
        if name == "pack":  # importing h5py starts a process, which must be before MPI runs
            importlib.import_module(module)
        elif rank == 0 and failure is None and getattr(settings, "progress", "") != "none":
            ranks = f"{size} ranks" if size > 1 else "1 rank"
            say(f"hpctrain {name}: starting on {ranks} ...", sys.stderr)
        from hpctrain.parallel.mpi import abort_all, call_on_all, conclude, start_mpi

        watchdog.abort = abort_all
        try:
            comm = start_mpi()
            call_on_all(comm, lambda: raise_(failure))
            comm.Free()
            watchdog.doing(f"importing {module}")
            main = importlib.import_module(module).main
            watchdog.imported("starting")
            return int(main(settings))
        except BaseException as error:
            return conclude(error)


def raise_(failure: Failure | None) -> None:
    """Raise it, if it is one."""
    if failure is not None:
        raise failure


def meet(watchdog: Watchdog, settings: Any) -> None:
    """Keep heartbeats where all ranks of this launch find them, as long as there is no run folder.
    Where no place can be written, ranks that hang have no name.
    """
    launch = re.sub(r"[^A-Za-z0-9.-]", "-", launch_name() or "")
    for base in meeting_places(settings) if launch else ():
        folder = base / f"{FOLDER}{launch}"
        if is_own(folder):
            with suppress(UsageError):
                watchdog.keep_in(folder, own=True)
                if watchdog.rank == 0:
                    sweep(base, folder)
                return


def meeting_places(settings: Any) -> tuple[Path, ...]:
    """Folders that all ranks should see: where there are several hosts, of the pack that is
    written, of the runs, of the start.
    """
    if launched_size() == local_size():
        return (Path(tempfile.gettempdir()),)
    if isinstance(settings, PackConfig):
        return Path(settings.output or ".").parent, Path()
    return Path(settings.runs_dir), Path()


def is_own(folder: Path) -> bool:
    """Make the folder; whether it is there, this user's, and nobody else may write into it."""
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        found = folder.lstat()
        private = found.st_uid == os.geteuid() and not found.st_mode & 0o022
        return stat.S_ISDIR(found.st_mode) and private
    except OSError:
        return False
    return True


def sweep(base: Path, current: Path) -> None:
    """Take away such folders of launches that were killed, those of a hang after an hour: somebody
    may want to read its stacks.
    """
    with suppress(OSError):
        now = current.stat().st_mtime
        for folder in base.glob(f"{FOLDER}*"):
            found = folder.lstat()
            beats = read_beats(folder)
            gone = beats and all(map(is_gone, beats)) and not (folder / Turn.FILE).exists()
            if found.st_uid == os.geteuid() and (gone or now - found.st_mtime > OLD):
                shutil.rmtree(folder, ignore_errors=True)
