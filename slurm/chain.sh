#!/bin/bash
# Jobs in a chain, for sites where requeueing is disabled: each goes on where the one before ended;
# once the run is finished, the rest end at once.
#
#   slurm/chain.sh 5 slurm/train.sbatch --data flowers.h5 --run first
#
set -euo pipefail
count=$1 script=$2
shift 2
case " $* " in *" --run "*) ;; *) set -- "$@" --run "chain-$(date +%Y%m%d-%H%M%S)" ;; esac
after=()
for ((number = 1; number <= count; number++)); do
    id=$(sbatch --parsable --no-requeue ${after[@]+"${after[@]}"} "$script" "$@")
    echo "job $id, $number of $count"
    after=(--dependency="afterany:${id%%;*}")
done
