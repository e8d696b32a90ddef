"""Where the files of a split of JPEG files begin and end."""

from __future__ import annotations

import numpy as np

from hpctrain.data.pack_file import PackFile
from hpctrain.errors import UsageError


def read_offsets(file: PackFile) -> np.ndarray:
    """(N + 1,) int64: file i is bytes offsets[i] to offsets[i + 1] of the split's files.

    Raises UsageError unless they go up, from 0 to the bytes that there are.
    """
    split = file.split
    offsets = file.numbers("offsets", split.offsets_offset, split.rows + 1)
    if (
        offsets[0] != 0
        or offsets[-1] != split.files_bytes
        or not (offsets[1:] > offsets[:-1]).all()
    ):
        raise UsageError(
            f"{file.pack.path}: offsets of split {split.name!r} do not cut its"
            f" {split.files_bytes:,} bytes into {split.rows:,} files: the file is damaged, pack it"
            " again"
        )
    return offsets
