"""The built-in data sets: their names, the folder that keeps them, and the flowers' download.

The flowers are 3,670 JPEG photographs in five classes, downloaded once. The SHA-256 is the one that
TensorFlow Datasets publishes for them (tf_flowers, checksums.tsv).
"""

from __future__ import annotations

import sys
from pathlib import Path

from hpctrain.errors import RunError, UsageError
from hpctrain.text import say
from hpctrain.watchdog import doing

BUILT_IN = ("digits", "flowers")
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
