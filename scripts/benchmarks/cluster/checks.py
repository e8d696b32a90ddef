"""The checks of cluster_check. Each returns its result in one line, and details.

A check raises a Failure if it failed.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from hpctrain import launch
from hpctrain.cluster import LEFT
from hpctrain.errors import RunError
from hpctrain.supervise import newest_step
from hpctrain.text import counted, listed
from scripts.benchmarks.cluster.site import PROGRAM, RANK, Site

Found = tuple[str, str]  # a line, and details as Markdown or ""
PACED, MORTAL = (("--model", f"{RANK}:{name}") for name in ("paced", "mortal"))
SLOW_START = 15.0  # seconds to start Python and import its packages


def check_launch(site: Site) -> Found:
    """Launch all ranks, and collect their facts."""
    site.facts = site.ask()
    site.ranks = len(site.facts)
    slowest = max(rank["started"] for rank in site.facts)
    line = f"{counted(site.ranks, 'rank')} on {counted(len(site.hosts), 'node')};"
    line += " start of Python and its packages:"
    line += f" {slowest:.1f} s"
    line += ": slow, use slurm/local_python.sh" if slowest > SLOW_START else ""
    hosts = [(h, [r for r in site.facts if r["host"] == h]) for h in site.hosts]
    rows = [(h, len(ranks), ranks[0]["system"], ranks[0]["network"]) for h, ranks in hosts]
    return line, table(("node", "ranks", "system", "network"), rows)


def check_doctor(site: Site) -> Found:
    """Run doctor on all ranks."""
    text = site.run([*site.command(), *PROGRAM, "doctor"])
    return text.splitlines()[-1], f"```\n{text}\n```\n"


def check_bits(site: Site) -> Found:
    """Train on 1, 2, ... ranks, with more than 8 on five counts; compare the digests."""
    n, rows = site.ranks, []
    if n == 1:
        raise RunError("one rank was launched: there is nothing to compare")
    for ranks in range(1, n + 1) if n <= 8 else (1, 2, 3, n - 1, n):
        places = site.ask(ranks)
        if len(places) != ranks:
            raise RunError(f"{counted(ranks, 'rank')} asked for, {len(places)} launched")
        digest = site.train(f"bits-{ranks}", ranks=ranks)
        rows.append((ranks, len({place["host"] for place in places}), digest))
    if len({digest for _, _, digest in rows}) > 1:
        raise RunError("; ".join(f"{ranks} ranks: {digest}" for ranks, _, digest in rows))
    site.undisturbed = rows[0][2]
    nodes = max(count for _, count, _ in rows)
    line = f"{listed(ranks for ranks, _, _ in rows)} ranks on up to {counted(nodes, 'node')}"
    line += ": one digest"
    return line, table(("ranks", "nodes", "digest"), rows)


def check_kill(site: Site) -> Found:
    """Kill a rank (SIGKILL) under supervise, which must resume the run from a checkpoint."""
    env = {k: v for k, v in launch.environment().items() if k != "SLURM_RESTART_COUNT"}
    train = [*site.command(), *PROGRAM, *site.words("killed", *MORTAL)]
    text = site.run([*PROGRAM, "supervise", "--", *train], env)
    again = re.search(r"launch 1 failed, (.*); restarting.* after step (\d+)", text)
    if again is None:
        said = re.search(r"hpctrain supervise: (.*)", text)
        raise RunError(f"not resumed from a checkpoint: {said[1] if said else 'no rank died'}")
    return f"resumed after step {again[2]}, {site.compare('killed')}; cause: {again[1]}", ""


def check_notice(site: Site) -> Found:
    """Send SIGUSR2 to a run, which must save and exit with 75; resume it."""
    folder, log = site.folder / "noticed", site.log
    command = [*site.command(), *PROGRAM, *site.words("noticed", *PACED)]
    record = launch.LaunchRecord(folder)
    process = launch.start(command, log, launch.environment())
    try:
        while not newest_step(folder) and process.poll() is None and site.left > 1:
            time.sleep(0.1)
        process.send_signal(signal.SIGUSR2)
        code, outcome = process.wait(timeout=site.left), record.outcome()
    finally:
        launch.end(process)
    name, step = Path(command[0]).name, newest_step(folder)
    if (code, outcome.status) != (LEFT, "preempted"):
        raise RunError(f"SIGUSR2 to {name}: exit code {code}, {outcome.status or 'no end'}")
    site.train("noticed", *PACED, "--resume", "auto")
    line = f"SIGUSR2 to {name}: exit code {LEFT}, saved after step {step}, resumed,"
    return f"{line} {site.compare('noticed')}", ""


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table in Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


CHECKS: dict[str, Callable[[Site], Found]] = {
    "launch": check_launch,
    "doctor": check_doctor,
    "same bits": check_bits,
    "killed rank": check_kill,
    "notice": check_notice,
}
