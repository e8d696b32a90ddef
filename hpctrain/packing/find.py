"""Find the pack, or files, that ``--data`` names; built-in sets are made when first used.

Two processes may make the same set at the same time: each renames a file of equal bytes.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from hpctrain.data.file_set import is_pattern
from hpctrain.errors import UsageError, did_you_mean
from hpctrain.packing.builtin import BUILT_IN, pack_name, task_of_pack
from hpctrain.text import listed

HDF5_ENDS = (".h5", ".hdf5", ".nc", ".nc4", ".mat")  # of names of files that a folder may hold


def find_pack_path(data: str, cache_dir: str, task: str = "classify") -> Path:
    """Return the path of the pack `data`: a file, or a built-in set in `cache_dir`, made if needed.

    The shapes have a pack for each `task` that learns other targets. A pattern of files is returned
    as it is. Built-in names take precedence: write ./digits for a file of that name. Raises
    UsageError if `data` is not a file, and what `pack` raises.
    """
    path = Path(data)
    if data in BUILT_IN:
        path = Path(cache_dir) / pack_name(data, task)
        if not path.exists():
            from hpctrain.config import PackConfig
            from hpctrain.packing.make import make_pack

            # One job: this may be a rank, and no process should be started after MPI_Init. Another
            # one may have finished by now: replacing its file with an equal one is harmless.
            make_pack(
                PackConfig(
                    source=data,
                    task=task_of_pack(data, task),
                    cache_dir=cache_dir,
                    jobs=1,
                    overwrite=True,
                )
            )
    elif is_pattern(data):
        pass
    elif path.is_dir():
        ends = [end for end in HDF5_ENDS if any(path.glob(f"*{end}"))]
        if ends:
            pattern = shlex.quote(str(path / f"*{ends[0]}"))
            raise UsageError(
                f"--data {data} is a folder: name HDF5 files in it by a pattern, --data {pattern}"
            )
        raise UsageError(
            f"--data {data} is not a pack: run python -m hpctrain pack {shlex.quote(data)} first"
        )
    elif not path.is_file():
        names = [*BUILT_IN, *sorted(map(str, path.parent.glob("*.h5")))]
        hint = did_you_mean(data, names)
        if "{" in data:
            hint = "; a pattern of files has *, ?, [...] and **, but no braces"
        raise UsageError(f"--data {data!r}: no such data set; there are {listed(names)}{hint}")
    return path
