"""A program: build and call all accepted parts of a library, and say what they did beside that.

python -m tests.support.audited SETTING LIBRARY FOLDER

FOLDER becomes the current folder, the first of sys.path, and holds a module for each name of an
installed package, which must not be imported. Printed, as JSON, are the number of parts and, by the
name of the part, the events of sys.addaudithook that are no reads of installed files or hpctrain's.
"""

import contextlib
import importlib
import importlib.metadata
import json
import os
import sys
import sysconfig
import warnings
from pathlib import Path

import torch

from hpctrain.config.installed import is_installed
from hpctrain.config.parts import MODULES, REGISTRIES, Part, accepted_names, load_class
from hpctrain.models.library import make_of_library
from scripts.parts import JUDGES

#: Prefixes of events that leave the process, or change files.
FORBIDDEN = (
    *("socket.", "subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.spawn"),
    *("urllib.", "http.", "ftplib.", "smtplib.", "os.remove", "os.rename", "os.rmdir", "os.mkdir"),
    *("os.truncate", "os.link", "os.symlink", "os.chmod", "os.putenv", "shutil.", "tempfile."),
    *("pty.", "webbrowser.", "sqlite3.", "os.kill"),
)
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
REGISTERED = ("timm:test_resnet", "timm:test_vit", "timm:test_convnext", "timm:test_efficientnet")
ROOT = str(Path(__file__).resolve().parents[2])  # hpctrain's own files, which warnings quote
READABLE = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), sys.base_prefix, ROOT)

events: dict[str, list[str]] = {}
current: list[str] = []


def audit(event, arguments):
    """Note an event that is no read of an installed file."""
    if not current:
        return
    if event == "open":
        file, _, flags = arguments
        is_read = not (flags or 0) & WRITES
        if isinstance(file, int):
            return
        path = os.path.abspath(os.fsdecode(file))
        if is_read and (is_installed(path) or path.startswith(READABLE)):
            return
        note(f"open {path}{'' if is_read else ' to write'}")
    elif event.startswith(FORBIDDEN):
        note(f"{event} {arguments!r}"[:200])


def note(text):
    """Note an event of the current part, once."""
    of_part = events.setdefault(current[-1], [])
    if text not in of_part:
        of_part.append(text)


@contextlib.contextmanager
def audited(name):
    current.append(name)
    yield
    current.pop()


def put_shadows(folder):
    """Make a module that says that it was imported for each name not imported so far."""
    names = {*importlib.metadata.packages_distributions()} | {*sys.stdlib_module_names}
    for name in sorted(names - {*sys.modules}):
        if name.isidentifier():
            Path(folder, f"{name}.py").write_text(f"raise SystemExit('{name} is a shadow')\n")
    os.chdir(folder)
    sys.path.insert(0, str(Path.cwd()))
    importlib.invalidate_caches()


def main(setting, library, folder):
    judge = importlib.import_module(f"scripts.parts.{JUDGES[setting]}")
    if setting == "metric":  # torchmetrics imports it where it is there; it makes a cache of fonts
        with contextlib.suppress(ImportError):
            importlib.import_module("matplotlib.pyplot")
    sys.addaudithook(audit)
    warnings.simplefilter("ignore")
    with audited("import"):
        importlib.import_module("torch._dynamo")  # torch's compiler, which some import at first use
    if (setting, library) in REGISTRIES:
        names = REGISTERED
        with audited("import"):
            make_of_library(names[0], (32, 32, 3), (5,))
    else:
        names = [f"{library}:{name}" for name in accepted_names(setting, library)]
        with audited("import"):
            load_class(Part(setting, names[0], library, names[0].partition(":")[2], (), {}))
    put_shadows(folder)
    for name in names:
        with audited(name):
            if (setting, library) in REGISTRIES:
                make_of_library(name, (32, 32, 3), (5,))(torch.rand(2, 3, 32, 32)).sum().backward()
            else:
                judge.sample(name)
    print(json.dumps({"parts": len(names), "events": events}))


if __name__ == "__main__":
    assert sys.argv[2] in MODULES[sys.argv[1]]
    main(*sys.argv[1:])
