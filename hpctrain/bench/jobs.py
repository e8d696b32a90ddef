"""Jobs of ``hpctrain bench``: started under mpirun, ended in any case, read from their records."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from hpctrain import launch
from hpctrain.errors import RunError, UsageError
from hpctrain.text import say

JOB_LIMIT = 1800.0  # seconds


def steps_rate(steps: list[dict[str, Any]], warm: int) -> tuple[float, float]:
    """images/s by the wall clock from the end of step `warm` to the end of the last, and the share
    of that time which the steps' own seconds account for (the rest lies between epochs).
    """
    timed = steps[warm:]
    elapsed = moment(timed[-1]) - moment(steps[warm - 1])
    own = sum(step["seconds"]["total"] for step in timed)
    return sum(step["rows"] for step in timed) / elapsed, own / elapsed


def moment(record: dict[str, Any]) -> float:
    """When a record was made, in seconds since 1970."""
    return datetime.fromisoformat(record["time"]).timestamp()


def run_job(command: list[str], name: str, env: Mapping[str, str] | None = None) -> None:
    """Run a job to its end, by default in `environment()`. RunError with its last words if it fails
    or takes too long; UsageError if it says that it was wrongly asked for.
    """
    say(f"running {name} ...", sys.stderr)
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=env or environment(),
    )
    try:
        printed, _ = process.communicate(timeout=JOB_LIMIT)
    except subprocess.TimeoutExpired:
        raise RunError(f"{name}: not done after {JOB_LIMIT:.0f} s: {' '.join(command)}") from None
    finally:
        if process.poll() is None:  # also on Ctrl-C: mpirun then ends its ranks
            process.terminate()
            try:
                process.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
    if process.returncode:
        words = launch.last_words(printed)
        if process.returncode == UsageError.exit_code:
            raise UsageError(words.removeprefix("hpctrain: "))
        error = RunError(f"{name} failed ({process.returncode}): {words}")
        error.add_note(printed)  # for a log; whoever tells the error tells the line above
        raise error


def environment() -> dict[str, str]:
    """One thread a rank, whatever the shell says."""
    return launch.environment({"OMP_NUM_THREADS": "1"})


def free_port() -> int:
    """A TCP port of this host that nobody uses now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
