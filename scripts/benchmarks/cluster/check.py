"""``scripts/cluster_check``: run all checks of a site in turn, and write one report.

Exit code 0 if no check failed, 1 if any check failed, 2 for a mistake in the command line. A check
that is not possible at this site counts neither as passed nor as failed.
"""

from __future__ import annotations

import argparse
import getpass
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from hpctrain import __version__, launch
from hpctrain.doctor.machine import file_system
from hpctrain.errors import Failure, RunError, first_line
from hpctrain.supervise.nodes import nodes_of_job
from hpctrain.text import say
from scripts.benchmarks.cluster.checks import CHECKS, table
from scripts.benchmarks.cluster.site import NotPossible, Site, find_launcher
from scripts.benchmarks.gpu.check import make_folder, output_of

VERDICTS = PASSED, FAILED, NOT_POSSIBLE = "passed", "failed", "not possible here"
TAIL = 30  # log lines in the report for a failed check
SUBMITTED = 4  # --submit multiplies the time limit of its check by this
SECRET = re.compile(r"(?i)(\w*(?:token|passw|secret|api_?key)\w*\s*[=:]\s*)\S+")
ACCOUNT = re.compile(r"(?:^|\s)(?:-A|--account)[=\s]*([^\s=]+)")
ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b")
BUGS = (OSError, ValueError, LookupError, TypeError, subprocess.SubprocessError)

Results = dict[str, tuple[str, str, str]]  # by check: the verdict, a line, details


def main() -> int:
    """Run the command; return its exit code."""
    options = parse()
    try:
        launcher = find_launcher(options.launch)
        output = options.output or Path("runs") / f"cluster_check-{datetime.now():%Y%m%d-%H%M%S}"
        output = make_folder(output).resolve()
        image = str(Path(options.image).resolve()) if Path(options.image).exists() else ""
        site = Site(output / "work", launcher, output / "log.txt", image or options.image)
        site.submit, site.limit = options.submit, options.limit
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
    add("--submit", nargs="?", const="", help="test requeueing with a batch job; sbatch options")
    add("--image", default="", help="also train in this container image")
    return parser.parse_args()


def check(site: Site, report: Path) -> int:
    """Run the checks, print a line for each, write the report; return the exit code."""
    results: Results = {}
    limit = site.limit
    try:
        for name in CHECKS:
            waits = name == "notice" and site.submit is not None
            site.limit = limit * (SUBMITTED if waits else 1)
            results[name] = verdict, line, _ = run_check(site, name)
            say(f"{verdict:18} {name}: {line}")
            report.write_text(hide(write(site, results), names_to_hide(site)))
    finally:
        shutil.rmtree(site.folder, ignore_errors=True)
    verdicts = [verdict for verdict, _, _ in results.values()]
    say(", ".join(f"{verdicts.count(each)} {each}" for each in VERDICTS))
    say(f"Check {report} before you share it. Do not share {site.log}.")
    return int(FAILED in verdicts)


def run_check(site: Site, name: str) -> tuple[str, str, str]:
    """Run one check; return its verdict, a summary in one line, and details."""
    site.ends, start = time.monotonic() + site.limit, site.log.stat().st_size
    try:
        return PASSED, *CHECKS[name](site)
    except NotPossible as reason:
        return NOT_POSSIBLE, str(reason), ""
    except (Failure, *BUGS) as error:
        kind = "" if isinstance(error, Failure) else f"{type(error).__name__}: "
        tail = "\n".join(launch.log_tail(site.log, start).splitlines()[-TAIL:])
        return FAILED, f"{kind}{first_line(error)}", f"```\n{tail}\n```\n"


def write(site: Site, results: Results) -> str:
    """Return the report in Markdown, not yet anonymized."""
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


def names_to_hide(site: Site) -> dict[str, str]:
    """Return the names that the report must not contain, each with its replacement."""
    names = {socket.getfqdn(): "login", socket.gethostname(): "login"}
    hosts = [rank["host"] for rank in site.facts]
    with suppress(RunError):  # no answer of scontrol
        hosts += nodes_of_job(os.environ)
    for number, host in enumerate(dict.fromkeys(hosts), 1):
        names |= {host: f"node{number}", host.partition(".")[0]: f"node{number}"}
    names |= {sys.prefix: "ENVIRONMENT", str(launch.ROOT): "CLONE", str(Path.home()): "HOME"}
    names |= {str(site.folder.parent): "OUTPUT"}
    with suppress(KeyError, OSError):  # a user without a name, as in some containers
        names[getpass.getuser()] = "USER"
    accounts = ACCOUNT.findall(f"{shlex.join(site.launcher)} {site.submit or ''}")
    accounts.append(os.environ.get("SLURM_JOB_ACCOUNT", ""))
    return names | dict.fromkeys(accounts, "ACCOUNT")


def hide(text: str, names: dict[str, str]) -> str:
    """Replace names, the longest first, IPv4 addresses, and values that look like secrets."""
    for name in sorted(filter(None, names), key=len, reverse=True):
        text = re.sub(rf"(?<![^\W_]){re.escape(name)}(?![^\W_])", names[name], text)
    return SECRET.sub(r"\1HIDDEN", ADDRESS.sub("ADDRESS", text))
