"""What a file names runs no code of the folder: libraries are the installed ones alone."""

from __future__ import annotations

import importlib
import json
import sys

import pytest

import hpctrain as hp
from tests.support.api import build_part, find_part, load_class, parts
from tests.support.launch import run

LIBRARIES = [(setting, library) for setting in parts.MODULES for library in parts.MODULES[setting]]
SHADOW = "raise SystemExit('a module of the folder was imported')"
#: What importing torch's compiler does, which some libraries import, and Matplotlib, which
#: torchmetrics imports where it is installed.
OF_TORCH = ("open /proc/", "open /tmp/", "os.remove ('/tmp/", "inductor", "matplotlib")


@pytest.fixture
def not_imported(monkeypatch):
    """No library of parts has been imported yet, in the test."""
    packages = {*parts.EXTRAS, "helper"}
    for name in [n for n in sys.modules if n.partition(".")[0] in packages]:
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in [n for n in sys.modules if n.partition(".")[0] in packages]:
        sys.modules.pop(name)  # monkeypatch puts those of before back


@pytest.mark.parametrize("as_package", [False, True])
@pytest.mark.parametrize(("setting", "library"), LIBRARIES)
def test_a_library_beside_the_file_is_refused_by_name(
    not_imported, monkeypatch, tmp_path, setting, library, as_package
):
    name = next(iter(parts.accepted_names(setting, library)), "test_resnet")
    part = find_part(setting, f"{library}:{name}")
    file = tmp_path / f"{part.package}.py"
    if as_package:
        file = tmp_path / part.package / "__init__.py"
        file.parent.mkdir()
    file.write_text(SHADOW)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    if part.package == "torch":  # hpctrain has imported it
        assert load_class(part).__module__.startswith("torch.")
        return
    with pytest.raises(hp.UsageError) as caught:
        load_class(part)
    line = str(caught.value)
    assert line.startswith(f"{part.flag}: {file} is not the installed {part.package}")


@pytest.fixture
def fake_kornia(not_imported, monkeypatch, tmp_path):
    """A kornia in a folder site-packages that imports `helper`, and a folder of the user's own."""
    site = tmp_path / "site-packages"
    own = tmp_path / "own"
    (site / "kornia/augmentation").mkdir(parents=True)
    own.mkdir()
    (site / "kornia/__init__.py").write_text("import helper")
    (site / "kornia/augmentation/__init__.py").write_text(
        "class RandomAffine:\n    def __init__(self, degrees):\n        import later"
    )
    (site / "kornia/augmentation/auto.py").write_text("")
    for name in ("helper", "later"):
        (site / f"{name}.py").write_text("")
    monkeypatch.chdir(own)
    monkeypatch.setattr(sys, "path", ["", str(site), *sys.path])
    importlib.invalidate_caches()
    return own


PART = find_part("augment", "kornia:RandomAffine(degrees=15)")


def test_what_a_library_imports_is_refused_beside_the_file_by_name(fake_kornia):
    (fake_kornia / "helper.py").write_text(SHADOW)
    with pytest.raises(hp.UsageError) as caught:
        load_class(PART)
    said = "helper.py has the name of a module that kornia imports: move it away"
    assert str(caught.value) == f"{PART.flag}: {fake_kornia}/{said}"


def test_what_a_library_imports_as_a_part_is_made_is_the_installed_one(fake_kornia, monkeypatch):
    (fake_kornia / "later.py").write_text(SHADOW)
    before = sys.path[:]
    build_part(PART)
    assert sys.modules.pop("later").__file__.endswith("site-packages/later.py")
    assert sys.path == before


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("setting", "library"), LIBRARIES)
def test_parts_open_no_file_and_no_connection_and_start_no_process(tmp_path, setting, library):
    """All accepted ones are built and called in a folder of modules that must not be imported."""
    program = [sys.executable, "-B", "-m", "tests.support.audited", setting, library]
    ended = run([*program, str(tmp_path)], timeout=850)
    assert ended.returncode == 0, ended.stderr[-3000:]
    said = json.loads(ended.stdout.splitlines()[-1])
    imported = said["events"].pop("import", [])
    assert [text for text in imported if not any(word in text for word in OF_TORCH)] == []
    assert said["events"] == {}
    assert said["parts"] >= min(4, len(parts.accepted_names(setting, library)) or 4)
