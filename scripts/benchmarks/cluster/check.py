"""``scripts/cluster_check``: run all checks of a site in turn, and write one report.

Exit code 0 if no check failed, 1 if any check failed, 2 for a mistake in the command line.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

from hpctrain import __version__, launch
from hpctrain.doctor import file_system
from hpctrain.errors import Failure, first_line
from hpctrain.text import say
from scripts.benchmarks.cluster.checks import CHECKS, table
from scripts.benchmarks.cluster.site import Site, find_launcher
from scripts.benchmarks.gpu.check import make_folder, output_of

VERDICTS = PASSED, FAILED = "passed", "failed"
TAIL = 30  # log lines in the report for a failed check
BUGS = (OSError, ValueError, LookupError, TypeError, subprocess.SubprocessError)

Results = dict[str, tuple[str, str, str]]  # by check: the verdict, a line, details


def main() -> int:
    """Run the command; return its exit code."""
    options = parse()
    try:
        launcher = find_launcher(options.launch)
        output = options.output or Path("runs") / f"cluster_check-{datetime.now():%Y%m%d-%H%M%S}"
        output = make_folder(output).resolve()
        site = Site(output / "work", launcher, output / "log.txt", options.limit)
        site.folder.mkdir()
        site.log.touch()
        os.chdir(launch.ROOT)  # ranks find scripts/ there, even if their launcher drops variables
        return check(site, output / "report.md")
    except Failure as error:
        say(f"cluster_check: {error}", sys.stderr)
        return error.exit_code


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Check a new site, and write one report.")
    add = parser.add_argument
    add("--launch", help="start ranks with this command; default: srun in a Slurm job, else mpirun")
    add("--output", type=Path, help="write to this new folder, on the file system to be tested")
    add("--limit", type=float, default=300, help="time limit per check, in seconds (default: 300)")
    return parser.parse_args()


def check(site: Site, report: Path) -> int:
    """Run the checks, print a line for each, write the report; return the exit code."""
    results: Results = {}
    try:
        for name in CHECKS:
            results[name] = verdict, line, _ = run_check(site, name)
            say(f"{verdict:8} {name}: {line}")
            report.write_text(write(site, results))
    finally:
        shutil.rmtree(site.folder, ignore_errors=True)
    verdicts = [verdict for verdict, _, _ in results.values()]
    say(", ".join(f"{verdicts.count(each)} {each}" for each in VERDICTS))
    say(f"{report} names hosts and paths: read it before you share it.")
    return int(FAILED in verdicts)


def run_check(site: Site, name: str) -> tuple[str, str, str]:
    """Run one check; return its verdict, a summary in one line, and details."""
    site.ends, start = time.monotonic() + site.limit, site.log.stat().st_size
    try:
        return PASSED, *CHECKS[name](site)
    except (Failure, *BUGS) as error:
        kind = "" if isinstance(error, Failure) else f"{type(error).__name__}: "
        tail = "\n".join(
            site.log.read_bytes()[start:].decode(errors="replace").splitlines()[-TAIL:]
        )
        return FAILED, f"{kind}{first_line(error)}", f"```\n{tail}\n```\n"


def write(site: Site, results: Results) -> str:
    """Return the report in Markdown."""
    versions = [output_of(name, "--version") for name in ("srun", "qstat", "flux")]
    about = {
        "date": f"{datetime.now():%Y-%m-%d %H:%M}",
        "hpctrain": f"{__version__}, commit {output_of('git', 'rev-parse', '--short', 'HEAD')}",
        "changed files": output_of("git", "diff", "--name-only", "HEAD") or "none",
        "launch command": shlex.join(site.command()),
        "MPI": site.facts[0]["MPI"] if site.facts else "unknown",
        "scheduler": next(filter(None, versions), "none"),
        "file system": file_system(str(site.folder), Path("/proc/self/mounts").read_text()),
    }
    parts = ["# cluster_check\n", table(("what", "found"), about.items())]
    rows = [(name, *found[:2]) for name, found in results.items()]
    parts += [table(("check", "result", "found"), rows)]
    parts += [f"## {name}\n\n{details}" for name, (_, _, details) in results.items() if details]
    return "\n".join(parts)
