"""``--slurm``: the networks as tasks of a Slurm job array, each an allocation of its own."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from hpctrain.config import SweepConfig
from hpctrain.errors import RunError, UsageError
from hpctrain.files import write_whole
from hpctrain.sweep.file import Network
from hpctrain.sweep.slots import python_program

FILE = "array.sbatch"
MOST_REQUEUES = 20
TEMPLATE = """\
#!/bin/bash
# Network number SLURM_ARRAY_TASK_ID of the sweep; written by hpctrain sweep --slurm.
#SBATCH --job-name={name}
#SBATCH --ntasks={ranks}
#SBATCH --signal=USR2@120          # a notice to all ranks two minutes before the end
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={logs}
sweep={folder}
hpctrain=({program})
models=({models})
[ ! -e "$sweep/STOP" ] || exit 0
settings=$(echo "$sweep"/$(printf %0{digits}d "$SLURM_ARRAY_TASK_ID")-*.toml)
srun --mpi="${{HPCTRAIN_PMI:-pmix}}" --cpus-per-task="${{SLURM_CPUS_PER_TASK:-1}}" \\
    --kill-on-bad-exit=1 "${{hpctrain[@]}}" train --config "$settings" \\
    ${{models[$SLURM_ARRAY_TASK_ID]:+--model "${{models[$SLURM_ARRAY_TASK_ID]}}"}} \\
    >>"${{settings%.toml}}.log" 2>&1 &
step=$!
trap 'kill -USR2 $step' USR2        # of --sbatch=--signal=B:USR2@120
while kill -0 $step 2>/dev/null; do wait $step; done
wait $step
code=$?
if [ $code = 75 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {requeues} ]; then
    scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID"
fi
"${{hpctrain[@]}}" sweep "$sweep" --results --progress none
exit $code
"""


def submit(settings: SweepConfig, folder: Path, networks: Sequence[Network]) -> str:
    """Write the batch script and submit these networks; the job's number. UsageError, RunError."""
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise UsageError("--slurm: there is no sbatch on the PATH")
    script = write_script(settings, folder, networks)
    numbers = ",".join(str(network.number) for network in networks)
    at_once = f"%{settings.slots}" if settings.slots else ""
    words = [sbatch, "--parsable", f"--array={numbers}{at_once}", *shlex.split(settings.sbatch)]
    env = {name: value for name, value in os.environ.items() if not name.startswith("SBATCH_ARRAY")}
    done = subprocess.run([*words, str(script)], capture_output=True, text=True, env=env)
    if done.returncode:
        raise RunError(f"sbatch failed: {' '.join(done.stderr.split())}")
    return re.split(r"[;\s]", done.stdout.strip())[0]


def write_script(settings: SweepConfig, folder: Path, networks: Sequence[Network]) -> Path:
    """The batch script of the sweep in this folder, for these of its networks."""
    whole = folder.resolve()
    if not str(whole).isprintable() or "\\" in str(whole):  # sbatch reads its lines by other rules
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
        models=" ".join(f"[{n.number}]={shlex.quote(n.imported)}" for n in networks if n.imported),
        digits=len(networks[0].name.partition("-")[0]),
        requeues=MOST_REQUEUES,
    )
    path = folder / FILE
    try:
        write_whole(path, text)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}") from error
    return path
