"""``scripts/gpu_check``: run all rows in turn, each in a process with a time limit of its own.

Prints one table, and writes a folder with the table, the figures as JSON with facts about the
machine, and the log. Exit code 0 if every row that was run met its targets; 1 if one missed its
target or failed; 2 if there is no GPU, so that nothing was checked. A rehearsal fails only if a
row failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hpctrain import __version__, launch
from hpctrain.errors import Failure, UsageError, did_you_mean
from hpctrain.parallel.device import built_for, nccl_version, processor_name
from scripts.benchmarks.gpu.case import FAILED, MISSED, NOT_RUN, Result, not_run
from scripts.benchmarks.gpu.rows import RESULTS, ROWS

if TYPE_CHECKING:
    from rich.table import Table

Found = dict[str, list[Result]]  # by row
SECONDS = 460.0  # for all rows
LEAST = 10.0  # seconds; with less time left no row is started
REHEARSAL = "R E H E A R S A L :   N O   R E S U L T"


def main() -> int:
    """Run the command; return its exit code."""
    options = parse()
    try:
        names = chosen(options.only)
        if options.data is not None and not Path(options.data).is_file():
            raise UsageError(f"--data {options.data}: there is no such file")
        return check(options, names, make_folder(options.output))
    except Failure as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return error.exit_code


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Run what needs a GPU, for 8 minutes at most.")
    parser.add_argument("--only", help=f"rows to run, separated by commas: {', '.join(ROWS)}")
    parser.add_argument("--data", help="pack of the flowers; else they are downloaded")
    parser.add_argument("--output", type=Path, help="new folder; default runs/gpu_check-DATE")
    parser.add_argument(
        "--rehearse",
        nargs="?",
        const="cpu",
        choices=("cpu", "cuda"),
        help="run every row with tiny sizes on this device (default: cpu)",
    )
    return parser.parse_args()


def chosen(only: str | None) -> list[str]:
    """Return the rows to run. Raises UsageError for an unknown row."""
    names = list(ROWS) if only is None else only.split(",")
    for name in names:
        if name not in ROWS:
            hint = did_you_mean(name, ROWS) or f"; there are {', '.join(ROWS)}"
            raise UsageError(f"--only {name}: there is no such row{hint}")
    return names


def make_folder(output: Path | None) -> Path:
    """Create the folder for the results, which must be new. Raises UsageError."""
    folder = output or Path("runs") / f"gpu_check-{datetime.now():%Y%m%d-%H%M%S}"
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"--output {folder}: {error.strerror}; name a new folder") from None
    return folder


def check(options: argparse.Namespace, names: list[str], folder: Path) -> int:
    """Run the rows, print and write their results; return the exit code."""
    from hpctrain.report.console import Console, styled

    console = Console(width=None if sys.stdout.isatty() else 160)
    blind = options.rehearse != "cpu" and torch.cuda.device_count() == 0
    known = facts()
    ends = time.monotonic() + SECONDS
    found: Found = {}
    for name in names:
        if blind:
            found[name] = [not_run(ROWS[name].about, "no GPU here")]
            continue
        found[name] = run_row(name, options, folder / "log.txt", ends - time.monotonic())
        write(folder, options.rehearse, known, found)  # so that a crash does not lose them
    write(folder, options.rehearse, known, found)
    if options.rehearse:
        console.rule(styled(REHEARSAL, "bold red"))
    made = table(found, plain=not console.is_terminal)
    console.print(made)
    with open(folder / "table.txt", "w") as file:
        Console(file=file, width=160).print(table(found, plain=True))
    if options.rehearse:
        console.rule(styled(REHEARSAL, "bold red"))
    print(f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
    if blind:
        raise UsageError("torch sees no GPU, nothing was checked; --rehearse runs all on the CPU")
    verdicts = {result.verdict for results in found.values() for result in results}
    return int(bool(verdicts & ({FAILED} if options.rehearse else {FAILED, MISSED})))


def run_row(name: str, options: argparse.Namespace, log: Path, left: float) -> list[Result]:
    """Run a row in a process of its own, within its time and that of all rows; return results."""
    row = ROWS[name]
    if left < LEAST:
        return [not_run(row.about, f"the {SECONDS:.0f} s for all rows were over")]
    print(f"{name}: {row.about} ...", file=sys.stderr, flush=True)
    limit = min(row.seconds, left)
    with tempfile.TemporaryDirectory(prefix="hpctrain-gpu-") as work:
        words = [name, work, *(["--rehearse", options.rehearse] if options.rehearse else [])]
        words += ["--data", options.data] if options.data else []
        with open(log, "a") as file:
            print(f"== {name}: {row.about}", file=file)
        start = log.stat().st_size
        code = run_for([sys.executable, "-m", "scripts.benchmarks.gpu.rows", *words], log, limit)
        file_of_results = Path(work) / RESULTS
        text = file_of_results.read_text() if file_of_results.exists() else ""
    results = [Result(**json.loads(line)) for line in text.splitlines()]
    if code is None:
        results.append(not_run(f"the rest of {row.about}", f"its {limit:.0f} s were over"))
    elif code or not results:
        line = launch.last_error_line(log.read_bytes()[start:].decode(errors="replace"))
        results.append(Result(row.about, FAILED, remark=f"({code}) {line}"))
    return results


def run_for(command: list[str], log: Path, limit: float) -> int | None:
    """Run a command; return its exit code, or None if it was ended after `limit` seconds."""
    process = launch.start(command, log, launch.environment(launch.UNBOUND))
    try:
        return process.wait(timeout=limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        launch.end(process)  # also on Ctrl-C


def write(folder: Path, rehearsal: str | None, known: dict[str, object], found: Found) -> None:
    """Write results.json: facts about the machine and all results."""
    rows = {name: [result._asdict() for result in results] for name, results in found.items()}
    content = {"rehearsal": rehearsal is not None, "machine": known, "rows": rows}
    (folder / "results.json").write_text(json.dumps(content, indent=1) + "\n")


def table(found: Found, plain: bool) -> Table:
    """Return a table of all results, a section per row; without lines if `plain`."""
    from rich import box
    from rich.table import Table

    colours = {MISSED: "bold red", FAILED: "bold red", NOT_RUN: "yellow"}
    made = Table(box=None if plain else box.HEAVY_HEAD, padding=(0, 1))
    for heading in ("row", "what", "value", "target", "n"):
        made.add_column(heading, justify="right" if heading in ("value", "n") else "left")
    made.add_column("verdict", overflow="fold")
    for name, results in found.items():
        for number, result in enumerate(results):
            text = f"{result.verdict}: {result.remark}" if result.remark else result.verdict
            cells = [name if number == 0 else "", result.what, result.value, result.target]
            cells += [f"{result.n:,}" if result.n else "", text]
            made.add_row(*cells, style=colours.get(result.verdict))
        made.add_section()
    return made


def facts() -> dict[str, Any]:
    """Return facts about the machine and the software, without initializing CUDA in this process.

    They are the GPU, driver, versions, commit and command to which the figures belong.
    """
    gpus = output_of(
        "nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"
    )
    cudnn = torch.backends.cudnn.version() if built_for() else None
    changed = bool(output_of("git", "status", "--porcelain", "--untracked-files=no"))
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
        "commit": output_of("git", "rev-parse", "HEAD") + (" and changes" if changed else "")
        or "unknown",
        "hpctrain": __version__,
        "GPUs": gpus.splitlines() or "none",
        "torch built for": built_for() or "CPUs",
        "cuDNN": str(cudnn or "none"),
        "NCCL of torch": nccl_version() or "none",
        "torch": torch.__version__,
        "cupy": ", ".join(sorted(packages("cupy"))) or "none",
        "mpi4py": ", ".join(packages("mpi4py")) or "none",
        "Python": platform.python_version(),
        "processor": f"{processor_name()}, {len(os.sched_getaffinity(0))} cores allowed",
        "load before": round(os.getloadavg()[0], 2),
    }


def output_of(*command: str) -> str:
    """Return what a program prints, or "" if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=launch.ROOT)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def packages(start: str) -> list[str]:
    """Return the installed packages whose names begin with `start`, with their versions."""
    found = ((d.metadata["Name"] or "", d.version) for d in distributions())
    return [f"{name} {version}" for name, version in found if name.startswith(start)]
