"""The built-in data sets: their names, the folder that keeps them, and the flowers' download.

The flowers are 3,670 JPEG photographs in five classes, downloaded once. The SHA-256 is the one that
TensorFlow Datasets publishes for them (tf_flowers, checksums.tsv).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import cast

from hpctrain.config.values import ShapesTask
from hpctrain.errors import RunError, UsageError
from hpctrain.text import say
from hpctrain.watchdog import doing

GENERATED = ("digits", "shapes")
BUILT_IN = (*GENERATED, "flowers")
OF_SHAPES = ("multilabel", "regress")  # tasks with a pack of the shapes for each; others share one
URL = "https://storage.googleapis.com/download.tensorflow.org/example_images/flower_photos.tgz"
SHA256 = "4c54ace7911aaffe13a365c34f650e71dd5bf1be0a58b464e5a7183e3e595d9c"


def cache_path(cache_dir: str, name: str) -> Path:
    """Return the path of a file in `cache_dir`, which is made if needed. Raises UsageError."""
    try:
        Path(cache_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"--cache-dir {cache_dir} cannot be made: {error.strerror}; choose another"
        ) from None
    return Path(cache_dir, name)


def task_of_pack(name: str, task: str | None) -> ShapesTask | None:
    """Return the task that the pack of a built-in set is made for, if it has one for several."""
    if name == "shapes" and task in OF_SHAPES:
        return cast(ShapesTask, task)
    return None


def pack_name(name: str, task: str | None) -> str:
    """Return the name of the file of a built-in set."""
    own_task = task_of_pack(name, task)
    if own_task:
        return f"{name}-{own_task}.h5"
    return f"{name}.h5"


def fetch_flowers(cache_dir: str) -> Path:
    """Return the path of the archive in `cache_dir`; download it if needed. Raises RunError."""
    path = cache_path(cache_dir, "flower_photos.tgz")
    if path.exists():
        return path
    from http.client import HTTPException

    from torch.hub import download_url_to_file

    doing("downloading the flowers")
    say(f"downloading {URL} (229 MB) to {path}, within --hang-timeout", sys.stderr)
    try:
        download_url_to_file(URL, str(path), SHA256, progress=sys.stderr.isatty())
    except (OSError, RuntimeError, HTTPException) as error:  # OSError: also of the URL
        raise RunError(
            f"cannot download {URL} to {path}: {error}. Try again, or download it there by hand"
        ) from None
    return path
