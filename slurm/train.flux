#!/bin/bash
# Train on several nodes with Flux; not tested, see docs/cluster.md.
#
#   flux batch slurm/train.flux --data flowers.h5 --run first
#
# Flux cannot requeue a job: after exit code 75, submit the same command again to resume.
#
# flux: --job-name=hpctrain
# flux: --nodes=2
# flux: --exclusive
# flux: --time-limit=1h             # change --time-limit below, too
# flux: --signal=USR2@2m            # SIGUSR2 two minutes before the time limit
# flux: --output=hpctrain-{{id}}.log

source "${HPCTRAIN_VENV:-$PWD/.venv}/bin/activate"

# Two ranks per node. On GPU nodes, use one rank per GPU and --gpus-per-node=2. HPCTRAIN_PMI=pmix is
# for Open MPI 5 with the plugin flux-pmix.
exec python -m hpctrain supervise -- \
    flux run --nodes="$(flux getattr size)" --tasks-per-node=2 -o pmi="${HPCTRAIN_PMI:-simple}" \
    python -m hpctrain --time-limit 58m "$@"
