"""Where networks are trained: how many run side by side, and the commands that launch them.

On a workstation, a slot is a set of cores and GPUs of its own. In a Slurm allocation, it is a share
of the tasks, and Slurm gives each job step (`srun --exact`) its own cores and GPUs. With
``--slurm``, the networks are the tasks of a Slurm job array, each with its own allocation.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpctrain.config import SweepConfig
from hpctrain.config.imports import SETTINGS as OWN
from hpctrain.errors import RunError, UsageError
from hpctrain.files import write_whole, writing
from hpctrain.launch import UNBOUND, mpirun
from hpctrain.launcher import REQUESTS, tasks_by_node
from hpctrain.scheduler import MOST_REQUEUES
from hpctrain.sweep.file import SweepNetwork
from hpctrain.sweep.folder import settings_file
from hpctrain.text import ranges

ARRAY_FILE = "array.sbatch"
TEMPLATE = """\
#!/bin/bash
# Network number SLURM_ARRAY_TASK_ID of the sweep; written by hpctrain sweep --slurm.
#SBATCH --job-name={name}
#SBATCH --ntasks={ranks}
#SBATCH --signal=USR2@120          # SIGUSR2 to all ranks 2 minutes before the time limit
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={logs}
sweep={folder}
hpctrain=({program})
{functions}
[ ! -e "$sweep/STOP" ] || exit 0
n=$SLURM_ARRAY_TASK_ID
settings=$(echo "$sweep"/$(printf %0{digits}d "$SLURM_ARRAY_TASK_ID")-*.toml)
srun --mpi="${{HPCTRAIN_PMI:-pmix}}" --cpus-per-task="${{SLURM_CPUS_PER_TASK:-1}}" \\
    --kill-on-bad-exit=1 "${{hpctrain[@]}}" train --config "$settings" \\
    {words} \\
    >>"${{settings%.toml}}.log" 2>&1 &
step=$!
trap 'kill -USR2 $step' USR2        # for --sbatch=--signal=B:USR2@120
while kill -0 $step 2>/dev/null; do wait $step; done
wait $step
code=$?
if [ $code = 75 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {requeues} ]; then
    scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID"
fi
"${{hpctrain[@]}}" sweep "$sweep" --results --progress none
exit $code
"""


@dataclass(frozen=True)
class Slot:
    """A place for one network."""

    number: int  # 1, 2, ...
    cores: tuple[int, ...] = ()  # empty: all that this process may use
    gpus: tuple[str, ...] = ()

    def environment(self) -> dict[str, str]:
        """Return the environment variables to set for its ranks."""
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)} if self.gpus else {}
        return {**UNBOUND, **visible}

    def __str__(self) -> str:
        if self.gpus:
            return f"GPU {', '.join(self.gpus)}"
        return f"cores {ranges(self.cores)}" if self.cores else "any core"


@dataclass(frozen=True)
class Machine:
    """The slots to compute in, and how ranks are launched in them."""

    launcher: tuple[str, ...]  # the launch command up to python
    slots: tuple[Slot, ...]
    slurm: bool = False  # slots are job steps of a Slurm job

    def command(self, folder: Path, network: SweepNetwork) -> list[str]:
        """Return the command that launches a network of the sweep in `folder`."""
        words = [*python_program(), "train", "--config", str(settings_file(folder, network))]
        return [
            *self.launcher,
            *words,
            *(word for name, own in network.imported.items() for word in (f"--{name}", own)),
        ]


def python_program() -> list[str]:
    """Return the command that runs this installation of hpctrain."""
    return [sys.executable, "-m", "hpctrain"]


def find_machine(settings: SweepConfig, gpus_wanted: bool) -> Machine:
    """Return the machine with as many slots as fit, or as requested. Raises UsageError."""
    ranks = settings.ranks_per_network
    inside = "SLURM_JOB_ID" in os.environ
    if settings.launcher == "srun" and not inside:
        raise UsageError(
            "--launcher srun: this is no Slurm allocation; --slurm submits a job array"
        )
    if inside and settings.launcher != "mpirun":
        words, count = step_words(ranks, os.environ)
        slots = tuple(Slot(number) for number in range(1, (settings.slots or count) + 1))
        return Machine(words, slots, slurm=True)
    cores = sorted(os.sched_getaffinity(0))
    gpus = visible_gpus() if gpus_wanted else []
    return Machine((mpirun(), "-n", str(ranks)), make_slots(settings.slots, ranks, cores, gpus))


def make_slots(
    wanted: int | None, ranks: int, cores: Sequence[int], gpus: Sequence[str]
) -> tuple[Slot, ...]:
    """Split cores and GPUs into disjoint slots, as long as there is at least one per slot."""
    count = wanted or max(1, len(gpus or cores) // ranks)
    slots = []
    for number in range(count):
        own = _cut(cores, number, count) if len(cores) >= count else ()
        devices = _cut(gpus, number, count) if len(gpus) >= count else ()
        if gpus and not devices:  # more networks than GPUs: several networks share a GPU
            devices = (gpus[number % len(gpus)],)
        slots.append(Slot(number + 1, tuple(own), tuple(devices)))
    return tuple(slots)


def _cut(items: Sequence, number: int, count: int) -> Sequence:
    return items[len(items) * number // count : len(items) * (number + 1) // count]


def visible_gpus() -> list[str]:
    """Return the names of the GPUs visible to CUDA programs; empty without a driver."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        names = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
        return [name for name in names if name.strip() not in ("", "-1")]
    with suppress(OSError, subprocess.SubprocessError):
        query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
        found = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
        return found.stdout.split()
    return []


def step_words(ranks: int, env: Mapping[str, str]) -> tuple[tuple[str, ...], int]:
    """Return the srun command of one network in this allocation, and how many such steps fit.

    Raises UsageError if not even one fits.
    """
    tasks = tasks_by_node(env.get("SLURM_TASKS_PER_NODE") or env.get("SLURM_NTASKS", "1"))
    if sum(tasks) < ranks:
        raise UsageError(
            f"--ranks-per-network {ranks}: the allocation has {sum(tasks)} tasks; ask Slurm for"
            " more with --ntasks"
        )
    fit = sum(count // ranks for count in tasks) if ranks <= max(tasks) else sum(tasks) // ranks
    nodes = 1 if ranks <= max(tasks) else math.ceil(ranks / max(tasks))
    inherited = [word for name in REQUESTS if name in env for word in ("-u", name)]
    words = ["env", *inherited] if inherited else []
    words += ["srun", "--exact", f"--nodes={nodes}", f"--ntasks={ranks}"]
    words += [f"--mpi={env.get('HPCTRAIN_PMI', 'pmix')}", "--kill-on-bad-exit=1"]
    cores = env.get("SLURM_CPUS_PER_TASK") or env.get("SLURM_CPUS_PER_GPU", "1")
    words += [f"--cpus-per-task={cores}"]
    memory = env.get("SLURM_MEM_PER_NODE", "")
    if memory.isdigit() and int(memory):  # MiB; else one step takes it all and the others wait
        words.append(f"--mem={int(memory) * -(-ranks // nodes) // max(tasks)}M")
    if any(name in env for name in ("SLURM_GPUS", "SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS")):
        words.append("--gpus-per-task=1")
    return tuple(words), max(1, fit)


def submit_array(settings: SweepConfig, folder: Path, networks: Sequence[SweepNetwork]) -> str:
    """Write the batch script, submit these networks, and return the job ID.

    Raises UsageError if there is no sbatch, RunError if it fails.
    """
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise UsageError("--slurm: there is no sbatch on the PATH")
    script = write_array_script(settings, folder, networks)
    numbers = ",".join(str(network.number) for network in networks)
    at_once = f"%{settings.slots}" if settings.slots else ""
    words = [sbatch, "--parsable", f"--array={numbers}{at_once}", *shlex.split(settings.sbatch)]
    env = {name: value for name, value in os.environ.items() if not name.startswith("SBATCH_ARRAY")}
    done = subprocess.run([*words, str(script)], capture_output=True, text=True, env=env)
    if done.returncode:
        raise RunError(f"sbatch failed: {' '.join(done.stderr.split())}")
    return re.split(r"[;\s]", done.stdout.strip())[0]


def write_array_script(
    settings: SweepConfig, folder: Path, networks: Sequence[SweepNetwork]
) -> Path:
    """Write the batch script for these networks of the sweep in `folder`.

    Raises UsageError if a batch script cannot contain the folder's name.
    """
    whole = folder.resolve()
    if not str(whole).isprintable() or "\\" in str(whole):  # sbatch does not quote as a shell does
        raise UsageError(
            f"--slurm: the folder {str(whole)!r} has a character in its name that a batch script"
            " cannot hold: choose another --runs-dir or --name"
        )
    logs = str(whole).replace("%", "%%") + "/%a.slurm.log"
    text = TEMPLATE.format(
        name=shlex.quote(folder.name),
        ranks=settings.ranks_per_network,
        logs=shlex.quote(logs),
        folder=shlex.quote(str(whole)),
        program=" ".join(map(shlex.quote, python_program())),
        functions="\n".join(_bash_array(name, networks) for name in OWN),
        words=" ".join(f'${{{name}[$n]:+--{name} "${{{name}[$n]}}"}}' for name in OWN),
        digits=len(networks[0].name.partition("-")[0]),
        requeues=MOST_REQUEUES,
    )
    path = folder / ARRAY_FILE
    with writing(path):
        write_whole(path, text)
    return path


def _bash_array(name: str, networks: Sequence[SweepNetwork]) -> str:
    """Return a line that sets a bash array: the function for this setting, by network."""
    named = {n.number: n.imported[name] for n in networks if name in n.imported}
    return f"{name}=({' '.join(f'[{number}]={shlex.quote(own)}' for number, own in named.items())})"
