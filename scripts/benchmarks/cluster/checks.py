"""The checks of cluster_check. Each returns its result in one line, and details.

A check raises `NotPossible` if the site lacks what it needs, and a Failure if it failed.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from hpctrain import launch
from hpctrain.data.pack import write_pack
from hpctrain.errors import RunError, UsageError
from hpctrain.launcher import LEFT
from hpctrain.scheduler import ask
from hpctrain.supervise import newest_step
from hpctrain.text import counted, listed
from scripts.benchmarks.cluster.rank import PACE
from scripts.benchmarks.cluster.site import PROGRAM, RANK, NotPossible, Site
from scripts.benchmarks.gpu.check import end_group, output_of

Found = tuple[str, str]  # a line, and details as Markdown or ""
PACED, MORTAL = (("--model", f"{RANK}:{name}") for name in ("paced", "mortal"))
LENGTHS = (1_000, 29_000, 1_000_000, 25_600_000)  # numbers in a message; the last as in ResNet-50
TRANSPORTS = {"mpi": "MPI, host memory", "host": "MPI, GPU memory by way of host memory"}
TRANSPORTS |= {"mpi-gpu": "MPI, GPU memory", "nccl": "NCCL"}
SIDE, READ_BYTES, MOST_BYTES = 64, 32 << 20, 2 << 30  # pack: image side, bytes per rank, in all
SLOW_START, SLOW_FILES = 15.0, 1000  # seconds to start and import; operations/s
ADVICE = ": slow, use slurm/local_python.sh"
CONTAINERS = ("apptainer", "singularity", "podman")
FINAL = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")


def check_launch(site: Site) -> Found:
    """Launch all ranks, and collect their facts."""
    site.facts = site.ask("facts")
    site.ranks = len(site.facts)
    slowest = max(rank["started"] for rank in site.facts)
    line = f"{counted(site.ranks, 'rank')} on {counted(len(site.hosts), 'node')};"
    line += " start of Python and its packages:"
    line += f" {slowest:.1f} s{ADVICE if slowest > SLOW_START else ''}"
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
        raise NotPossible("one rank was launched: there is nothing to compare")
    for ranks in range(1, n + 1) if n <= 8 else (1, 2, 3, n - 1, n):
        places = site.ask("facts", ranks=ranks)
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


def check_allreduce(site: Site) -> Found:
    """Time and verify reductions by size, over each transport that the ranks can use."""
    rows, lines, output = [], [], site.folder / "sums.json"
    program = [*site.command(), sys.executable, "-m", "scripts.benchmarks.allreduce"]
    for transport, name in TRANSPORTS.items():
        try:
            site.run([*program, ",".join(map(str, LENGTHS)), str(output), transport])
        except UsageError as error:
            lines.append(f"* {name}: not possible here: {error}\n")
            continue
        for length, ways in json.loads(output.read_text()).items():
            size = 4 * int(length)
            rows += [(name, f"{size:,}", way, f"{1e6 * s:,.1f}") for way, s in ways.items()]
    names = listed(dict.fromkeys(row[0] for row in rows), separator="; ")
    heads = ("transport", "bytes", "way", "microseconds, median of the slowest rank")
    return f"sums are right with {names}", table(heads, rows) + "\n" + "".join(lines)


def check_files(site: Site) -> Found:
    """Read a pack with all ranks, and create, stat, open and remove small files."""
    rows, pack = min(READ_BYTES * site.ranks, MOST_BYTES) // (3 * SIDE**2), site.folder / "read.h5"
    numbers = (np.arange(rows) % 251).astype(np.uint8)[:, None, None, None]
    pixels = np.broadcast_to(numbers, (rows, SIDE, SIDE, 3))
    write_pack(pack, {"train": (pixels, np.zeros(rows, np.int64))}, "a", {"source": "check"})
    with open(pack, "rb") as file:
        os.fsync(file.fileno())  # only what is on disk can be dropped from the cache
    found = site.ask("files", str(pack), str(site.folder))
    pack.unlink()
    slowest = min(rate for name, rate in found.items() if "files/s" in name)
    line = f"{found['read by all ranks, MB/s']:,} MB/s by all ranks; {slowest:,} operations/s"
    details = "\nThe pack was dropped from each node's page cache before reading (posix_fadvise).\n"
    advice = ADVICE if slowest < SLOW_FILES else ""
    return line + advice, table(("what", "found"), found.items()) + details


def check_notice(site: Site) -> Found:
    """Send SIGUSR2 to a run, or with --submit let Slurm send it to a batch job; resume."""
    if site.submit is not None:
        return submit(site, site.submit)
    folder, log = site.folder / "noticed", site.log
    command = [*site.command(), *PROGRAM, *site.words("noticed", *PACED)]
    run = launch.LaunchedRun(folder, command, launch.environment(), log)
    try:
        while not newest_step(folder) and run.process.poll() is None and site.left > 1:
            time.sleep(0.1)
        run.preempt()
        code, outcome = run.process.wait(timeout=site.left), run.recorded()
    finally:
        end_group(run.process)
    name, step = Path(command[0]).name, newest_step(folder)
    if (code, outcome.status) != (LEFT, "preempted"):
        raise RunError(f"SIGUSR2 to {name}: exit code {code}, {outcome.status or 'no end'}")
    site.train("noticed", *PACED, "--resume", "auto")
    line = f"SIGUSR2 to {name}: exit code {LEFT}, saved after step {step}, resumed,"
    return f"{line} {site.compare('noticed')}; requeueing was not tested (--submit)", ""


def submit(site: Site, options: str) -> Found:
    """Submit a batch job that is signalled before its time limit, and wait until it ends."""
    if not shutil.which("sbatch"):
        raise NotPossible("--submit needs sbatch of Slurm")
    if not Path(sys.prefix, "bin", "activate").exists():
        raise NotPossible("the batch scripts need a virtual environment: . scripts/environment")
    site.undisturbed = site.undisturbed or site.train("undisturbed")
    nodes = max(len(site.hosts), 1)
    words = ["sbatch", "--parsable", f"--nodes={nodes}", "--time=2", "--signal=USR2@60"]
    words += [f"--ntasks-per-node={-(-site.ranks // nodes)}", f"--output={site.log}"]
    words += [*shlex.split(options), str(launch.ROOT / "slurm" / "train.sbatch")]
    env = {k: v for k, v in launch.environment().items() if not k.startswith("SLURM_")}
    env |= {k: v for k, v in os.environ.items() if k == "SLURM_CONF"}
    env |= {"HPCTRAIN_VENV": sys.prefix, PACE: "1.2"}  # 60 steps: 72 s
    job = site.run([*words, *site.words("requeued", *PACED)], env).split(";")[0]
    try:
        state = follow(site, job)
    finally:
        output_of("scancel", "--quiet", job)
    if state.get("JobState") not in FINAL:
        raise NotPossible(f"job {job} did not end in {site.limit:.0f} s: {state}")
    if state["JobState"] != "COMPLETED" or state["Restarts"] == "0":
        raise RunError(f"job {job} was not requeued and completed after its signal: {state}")
    line = f"a job of {counted(nodes, 'node')} was requeued after its signal"
    return f"{line}, {site.compare('requeued')}", ""


def follow(site: Site, job: str) -> dict[str, str]:
    """Return the state of a Slurm job when it has ended, or when the check's time is up.

    Slurm holds a requeued job for two minutes.
    """
    state: dict[str, str] = {}
    while site.left > 1 and state.get("JobState") not in FINAL:
        time.sleep(2)
        text = ask("scontrol", "show", "job", job)
        state = dict(re.findall(r"(JobState|Reason|Restarts)=(\S*)", text))
    return state


def check_container(site: Site) -> Found:
    """Train in a container on one rank and on two; compare the digests."""
    name = next((name for name in CONTAINERS if shutil.which(name)), None)
    if name is None or not site.image:
        raise NotPossible(
            f"no --image was given; {name or 'no ' + ' or '.join(CONTAINERS)} is here"
        )
    folder = site.folder
    enter = [name, "exec", "--nv", f"--bind={folder}", f"--pwd={folder}"]
    if name == "podman":
        enter = [name, "run", "--rm", "--network=host", "--ipc=host", "--pid=host"]
        enter += ["--userns=keep-id", "--volume=/tmp:/tmp", f"--volume={folder}:{folder}"]
        enter += [
            f"--workdir={folder}",
            *(f"--env={p}*" for p in ("OMPI_", "PMI", "PRTE", "SLURM")),
        ]
    env = {k: v for k, v in launch.environment().items() if k != "PYTHONPATH"}
    for ranks in (1, 2):
        program = [*enter, site.image, "python", "-m", "hpctrain"]
        site.run([*site.command(ranks), *program, *site.words(f"inside-{ranks}")], env)
    one, two = (site.digest(f"inside-{ranks}") for ranks in (1, 2))
    if one != two:
        raise RunError(f"1 rank: {one}, 2 ranks: {two}")
    line = f"{name}: one digest on 1 and 2 ranks"
    if site.undisturbed:
        same = one == site.undisturbed
        line += f", {'the same as' if same else 'different from'} outside the container"
    return line, ""


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
    "Allreduce": check_allreduce,
    "file system": check_files,
    "notice": check_notice,
    "container": check_container,
}
