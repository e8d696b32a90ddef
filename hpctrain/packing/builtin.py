"""Find the pack that ``--data`` names; built-in sets are made when first used.

Two processes may make the same set at the same time: each renames a file of equal bytes.

The flowers are 3,670 JPEG photographs in five classes, downloaded once. The SHA-256 is the one that
TensorFlow Datasets publishes for them (tf_flowers, checksums.tsv).
"""

from __future__ import annotations

import http.client
import shlex
import sys
from pathlib import Path

from hpctrain.errors import RunError, UsageError, did_you_mean
from hpctrain.text import listed, say
from hpctrain.watchdog import doing

BUILT_IN = ("digits", "flowers")
URL = "https://storage.googleapis.com/download.tensorflow.org/example_images/flower_photos.tgz"
SHA256 = "4c54ace7911aaffe13a365c34f650e71dd5bf1be0a58b464e5a7183e3e595d9c"


def locate(data: str, cache_dir: str) -> Path:
    """Return the path of the pack `data`: a file, or a built-in set in `cache_dir`, made if needed.

    Built-in names take precedence: write ./digits for a file of that name. Raises UsageError if
    `data` is not a file, and what `pack` raises.
    """
    path = Path(data)
    if data in BUILT_IN:
        path = Path(cache_dir) / f"{data}.h5"
        if not path.exists():
            from hpctrain.config import PackConfig
            from hpctrain.packing.make import make_pack

            # One job: this may be a rank, and no process should be started after MPI_Init. Another
            # one may have finished by now: replacing its file with an equal one is harmless.
            make_pack(PackConfig(data, cache_dir=cache_dir, jobs=1, overwrite=True))
    elif path.is_dir():
        command = f"python -m hpctrain pack {shlex.quote(data)}"
        raise UsageError(f"--data {data} is not a pack: run {command} first")
    elif not path.is_file():
        known = [*BUILT_IN, *sorted(map(str, path.parent.glob("*.h5")))]
        hint = did_you_mean(data, known)
        raise UsageError(f"--data {data!r}: no such data set; there are {listed(known)}{hint}")
    return path


def cache_path(cache_dir: str, name: str) -> Path:
    """Return the path of a file in `cache_dir`, which is made if needed. Raises UsageError."""
    try:
        Path(cache_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"cannot be made: {error.strerror}; choose another"
        raise UsageError(f"--cache-dir {cache_dir} {why}") from None
    return Path(cache_dir, name)


def fetch_flowers(cache_dir: str) -> Path:
    """Return the path of the archive in `cache_dir`; download it if needed. Raises RunError."""
    path = cache_path(cache_dir, "flower_photos.tgz")
    if path.exists():
        return path
    from torch.hub import download_url_to_file

    doing("downloading the flowers")
    say(f"downloading {URL} (229 MB) to {path}, within --hang-timeout", sys.stderr)
    try:
        download_url_to_file(URL, str(path), SHA256, progress=sys.stderr.isatty())
    except (OSError, RuntimeError, http.client.HTTPException) as error:  # OSError: also of the URL
        hint = "Try again, or download it there by hand"
        raise RunError(f"cannot download {URL} to {path}: {error}. {hint}") from None
    return path
