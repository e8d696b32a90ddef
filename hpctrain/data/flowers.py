"""The Flowers set: download flower_photos.tgz (3,670 JPEG photographs in five classes) once.

The SHA-256 is the one that TensorFlow Datasets publishes for it (tf_flowers, checksums.tsv).
"""

from __future__ import annotations

import http.client
import os
import sys
from pathlib import Path

from hpctrain.errors import RunError
from hpctrain.text import say
from hpctrain.watchdog import doing

URL = "https://storage.googleapis.com/download.tensorflow.org/example_images/flower_photos.tgz"
SHA256 = "4c54ace7911aaffe13a365c34f650e71dd5bf1be0a58b464e5a7183e3e595d9c"


def fetch_archive(cache_dir: str | os.PathLike[str]) -> Path:
    """Return the path of the archive in `cache_dir`; download it if it does not exist yet.

    Raises RunError if it cannot be downloaded or written, or is not the published one.
    """
    path = Path(cache_dir) / "flower_photos.tgz"
    if path.exists():
        return path
    from torch.hub import download_url_to_file

    doing("downloading the flowers")
    say(
        f"downloading {URL} (229 MB) to {path}; it may take --hang-timeout at most, and may be put"
        " there by hand",
        sys.stderr,
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        download_url_to_file(URL, str(path), SHA256, progress=sys.stderr.isatty())
    except (OSError, RuntimeError, http.client.HTTPException) as error:  # OSError: also of the URL
        raise RunError(
            f"cannot download {URL} to {path}: {error}. Try again, or download it there by hand"
        ) from None
    return path
