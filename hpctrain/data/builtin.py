"""What ``--data`` names -> the pack to open; built-in sets are made when first asked for.

Two processes that make the same set at the same time write equal bytes under names of their own
and rename them: both end well.
"""

from __future__ import annotations

import difflib
import shlex
from pathlib import Path

from hpctrain.errors import UsageError

BUILT_IN = ("digits", "flowers")
# What is refused here, because `pack` reads it: the reader of packs would only call it foreign.
SOURCES = (".tgz", ".tar", ".tar.gz", ".tar.bz2", ".tar.xz", ".zip", ".npz", "-ubyte", "-ubyte.gz")


def locate(data: str, data_dir: str) -> Path:
    """The pack that `data` means: a built-in set in `data_dir`, made if missing, or a file.

    A built-in name comes first: a file of that name is ./digits. Raises UsageError, one line, for
    anything that is no file or still has to be packed; making a set raises what `pack` raises.
    """
    path = Path(data)
    if data == "digits":
        return _digits(Path(data_dir))
    if data == "flowers":
        path = Path(data_dir) / "flowers.h5"
        return path if path.exists() else _make(data, path)
    if data and path.is_file() and not data.lower().endswith(SOURCES):
        return path
    if data and (path.is_file() or path.is_dir()):
        raise UsageError(
            f"--data {data} is {'a folder' if path.is_dir() else 'an archive'}, not a pack: run"
            f" python -m hpctrain pack {shlex.quote(data)} first"
        )
    if data and path.exists():
        raise UsageError(f"--data {data} is no regular file: give a pack")
    near = difflib.get_close_matches(data.lower(), BUILT_IN, n=1)
    hint = f"did you mean {near[0]}?" if near else f"built in are {' and '.join(BUILT_IN)}"
    raise UsageError(f"--data {data!r} is no file and no built-in set: {hint}")


def _digits(folder: Path) -> Path:
    """digits.h5 of this generator's version; where that name is taken, one with the version."""
    from hpctrain.data.digits import SOURCE, VERSION
    from hpctrain.data.packed import read_pack

    names = ("digits.h5", f"digits-v{VERSION}.h5")
    for path in (folder / name for name in names):
        if not path.exists():
            return _make("digits", path)
        made = read_pack(path).provenance
        if (made.get("source"), made.get("generator_version")) == (SOURCE, VERSION):
            return path
    raise UsageError(
        f"{folder} holds {' and '.join(names)}, but neither has the digits of generator version"
        f" {VERSION}: move one away, or choose another --data-dir"
    )


def _make(name: str, path: Path) -> Path:
    from hpctrain.config import PackConfig
    from hpctrain.data.pack import make_pack

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"--data-dir {path.parent} cannot be made: {error.strerror}; choose another"
        ) from None
    # Another process may have finished by now: replacing its file by an equal one harms nobody.
    return make_pack(
        PackConfig(source=name, output=str(path), data_dir=str(path.parent), overwrite=True)
    )
