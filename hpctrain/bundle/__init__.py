"""``hpctrain bundle``: copy Python and its packages to the disk of every node before ranks start.

    eval "$(python -m hpctrain bundle)"        # in a batch script, after activating the environment

A rank looks up 10,000 files at its start, and 1,000 ranks 10 million: too many for a file system
that all nodes share. Here one process reads all files once into an archive, which is kept and
used until a file changes. One process per node extracts it: from the copy that Slurm's sbcast
sends to the nodes, or else from the archive itself, which takes one large read. The shell code that
this command prints makes the rest of the script use the copies. They are removed when the job ends.

The copies are a folder ``hpctrain-job-python-JOB`` with

    venv/    the virtual environment, with hpctrain itself; headers and tests are links
    base/    the interpreter and standard library that it was made from
    key      the last file written; the folder has another name until all is extracted
"""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

from hpctrain.bundle.archive import BESIDE, ROOT, make_archive, python_path
from hpctrain.config import BundleConfig
from hpctrain.errors import RunError
from hpctrain.launcher import REQUESTS
from hpctrain.scheduler import ask
from hpctrain.text import say

TIMEOUT = 900.0  # seconds for all nodes to extract
#: Variables with folders in the environment that is copied.
PATHS = ("PATH", "LD_LIBRARY_PATH", "MPI4PY_LIBMPI", "OPAL_PREFIX", "PMIX_PREFIX", "PRTE_PREFIX")
#: Runs on each node, with the node's own shell and tar: of the archive's file system, only the
#: archive is read. With "stay" it waits until its job step is terminated at the end of the job, and
#: then for the last process that uses the copy, such as a rank that saves its checkpoint.
ON_NODE = r"""set -eu; umask 077
trap '' USR1 USR2; trap 'exit 1' TERM INT HUP
archive=$1 place=$2 key=$3 queued=$4 stay=$5 job=${2##*-} disk=${2%/*}
for old in "$disk"/hpctrain-job-*; do  # of jobs that were killed
    [ -n "$queued" ] && [ -O "$old" ] || continue
    echo "$queued" | grep -qx -e "${old##*-}" || rm -rf "$old"
done
if [ ! -O "$place" ] || [ "$(cat "$place/key" 2>/dev/null)" != "$key" ]; then
    part=$disk/hpctrain-job-part$$-$job
    trap 'rm -rf "$part"' EXIT
    mkdir -p "$disk"; mkdir "$part"
    tar -x --no-same-owner -f "$archive" -C "$part" 2>"$part/errors" ||
        { head -n 1 "$part/errors" >&2; exit 1; }
    rm -f "$part/errors"
    [ ! -e "$part/venv" ] || echo "home = $place/base/bin" >>"$part/venv/pyvenv.cfg"
    echo "$key" >"$part/key"
    rm -rf "$place"
    mv -T "$part" "$place" 2>/dev/null || [ "$(cat "$place/key")" = "$key" ]
fi
rm -f "$disk/hpctrain-job-tar-$job"
ended=""
[ "$stay" != stay ] || trap 'ended=yes' TERM INT HUP
echo ready
[ "$stay" = stay ] || exit 0
while [ -z "$ended" ]; do sleep 3600 & wait $! || kill $! || :; done
while ls -l /proc/[0-9]*/exe 2>/dev/null | grep -qF -e "-> $place/"; do sleep 0.2; done
rm -rf "$place"
"""


def main(settings: BundleConfig) -> int:
    """Put Python on all nodes and print the shell code that uses it there; return the exit code."""
    disk = Path(settings.disk or os.environ.get("LOCAL_DISK") or tempfile.gettempdir())
    job = os.environ.get("SLURM_JOB_ID", "")
    place = disk / f"hpctrain-job-python-{job or f'{socket.gethostname()}.{os.getppid()}'}"
    archive, key = make_archive(Path(settings.folder))
    words = (str(place), key, _queued_jobs() if job else "")
    if settings.launcher:
        each = shlex.split(settings.launcher)
        _extract([*each, *_on_node(archive, *words)], place)
    elif job:
        _extract_in_job(archive, words, place)
    _extract(_on_node(archive, *words), place)  # this host may be none of the nodes
    say(f"hpctrain bundle: Python starts from {place} on each node", sys.stderr)
    say(shell_code(place))
    if settings.launcher or not job:
        remove = shlex.join(["rm", "-rf", str(place)])
        everywhere = f"{settings.launcher} {remove}; " if settings.launcher else ""
        say(f"trap {shlex.quote(everywhere + remove)} EXIT")
    return 0


def _queued_jobs() -> str:
    """Return the numbers of the user's jobs that run or wait, by line; "" if squeue fails."""
    with suppress(RunError):
        return ask("squeue", "--noheader", f"--user={os.getuid()}", "--format=%A").strip()
    return ""


def _on_node(archive: Path, *words: str, stay: str = "go") -> list[str]:
    return ["sh", "-c", ON_NODE, "bundle", str(archive), *words, stay]


def _extract(command: list[str], place: Path) -> None:
    """Run the command, which extracts on one or several nodes. Raises RunError."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, timeout=TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _failure(place, str(error)) from error
    if done.returncode:
        raise _failure(place, f"{command[0]} ended with {done.returncode}")


def _extract_in_job(archive: Path, words: tuple[str, ...], place: Path) -> None:
    """Extract on all nodes of this Slurm job, in a step that removes the copies at its end."""
    nodes = int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
    if nodes > 1 and shutil.which("sbcast"):
        sent = place.with_name(place.name.replace("python", "tar"))
        if subprocess.run(["sbcast", "--force", str(archive), str(sent)], check=False).returncode:
            say("hpctrain bundle: sbcast failed; each node reads the archive", sys.stderr)
        else:
            archive = sent
    step = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--no-kill"]
    step += ["--cpus-per-task=1", "--mpi=none", "--overlap", "--input=none", "--quiet"]
    env = {name: value for name, value in os.environ.items() if name not in REQUESTS}
    process = subprocess.Popen(
        [*step, *_on_node(archive, *words, stay="stay")], stdout=subprocess.PIPE, env=env
    )
    assert process.stdout is not None
    limit = threading.Timer(TIMEOUT, process.kill)
    limit.start()
    ready = 0
    for line in process.stdout:
        ready += line == b"ready\n"
        if ready == nodes:
            limit.cancel()
            return
    limit.cancel()
    raise _failure(place, f"srun ended with {process.wait()}, {ready} of {nodes} nodes are ready")


def _failure(place: Path, why: str) -> RunError:
    return RunError(f"no copy of Python in {place} ({why}): ranks start from {sys.prefix}")


def shell_code(place: Path) -> str:
    """Return the exports with which a shell uses the copy in `place`."""
    old, new = sys.prefix, str(place / ROOT)
    lines = {"VIRTUAL_ENV": new} if "VIRTUAL_ENV" in os.environ else {}
    for name in PATHS:
        parts = os.environ.get(name, "").split(os.pathsep)
        inner = [part == old or part.startswith(f"{old}/") for part in parts]
        if any(inner):
            moved = (new + p[len(old) :] if i else p for p, i in zip(parts, inner, strict=True))
            lines[name] = os.pathsep.join(moved)
    if f"{new}/bin" not in lines.get("PATH", "").split(os.pathsep):
        lines["PATH"] = os.pathsep.join([f"{new}/bin", os.environ.get("PATH", "")])
    others = [folder for folder in python_path() if folder != BESIDE]
    if others != python_path():
        lines["PYTHONPATH"] = os.pathsep.join(others)
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in lines.items())
