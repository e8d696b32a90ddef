#!/bin/bash
# Submit dependent jobs, for sites where requeueing is disabled: each job resumes the run where the
# previous one ended; once the run is finished, the remaining jobs end immediately.
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
