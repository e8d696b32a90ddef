"""What is built for others: a wheel and an sdist that hold what a user needs, and nothing else."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tarfile
import tomllib
import zipfile

import pytest

import hpctrain
from tests.support.launch import ROOT, run
from tests.support.packs import make_pack

BUILD = "import sys; from setuptools import build_meta as b; getattr(b, sys.argv[1])(sys.argv[2])"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of an sdist, made from the files under version control, and of its wheel."""
    folder = tmp_path_factory.mktemp("package")
    listed = run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():  # else it was removed and that is not committed yet
            (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "tree" / name)
    build(folder / "tree", "build_sdist", folder)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as file:
        safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python 3.11.4
        file.extractall(folder / "sdist", **safe)
    (source,) = (folder / "sdist").iterdir()
    build(source, "build_wheel", folder)
    return folder


def build(source, kind, output):
    """As `python -m build --no-isolation` does, without network."""
    done = run([sys.executable, "-c", BUILD, kind, str(output)], cwd=source, env={"PYTHONPATH": ""})
    assert done.returncode == 0, done.stderr


def test_the_wheel_holds_the_package_and_its_data_alone(built):
    (wheel,) = built.glob("*.whl")
    assert wheel.name == f"hpctrain-{hpctrain.__version__}-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    inside = {name for name in names if not re.match(r"hpctrain-[^/]*\.dist-info/", name)}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "hpctrain").rglob("*.py")}
    pages = {str(path.relative_to(ROOT)) for path in (ROOT / "hpctrain/watch/page").iterdir()}
    templates = {f"hpctrain/templates/{path.name}" for path in (ROOT / "slurm").iterdir()}
    recipes = {f"hpctrain/recipes/{path.name}" for path in (ROOT / "scripts/recipes").iterdir()}
    assert len(templates) > 4 and recipes
    others = {"hpctrain/py.typed", "hpctrain/packing/glyphs.toml", "hpctrain/config/parts.toml"}
    assert inside == modules | pages | templates | recipes | others
    (scripts,) = [name for name in names if name.endswith("/entry_points.txt")]
    assert b"hpctrain = hpctrain.__main__:program" in zipfile.ZipFile(wheel).read(scripts)


def test_the_wheel_works_without_the_source_tree(built, tmp_path):
    (wheel,) = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    env = {"PYTHONPATH": str(tmp_path / "site")}
    recipe = tmp_path / "site/hpctrain/recipes/flowers.toml"
    words = ["train", "--config", str(recipe), "--random-crop", "0", "--model", "digits"]
    words += ["--data", str(make_pack(tmp_path / "a.h5", {"train": 64, "test": 9})), "--dry-run"]
    code = "import sys, hpctrain, hpctrain.cli; print(hpctrain.__file__)\n"
    code += "sys.exit(hpctrain.cli.main(sys.argv[1:]))"
    done = run([sys.executable, "-c", code, *words], cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == str(tmp_path / "site/hpctrain/__init__.py")
    assert os.listdir(tmp_path / "site/hpctrain/templates")


def test_the_sdist_holds_tests_and_pages(built):
    (source,) = (built / "sdist").iterdir()
    names = "tests/gpu/emulator/build docs/data.md scripts/test constraints.txt SECURITY.md LICENSE"
    assert [name for name in names.split() if not (source / name).is_file()] == []


def test_the_oldest_versions_that_are_tested_are_the_oldest_allowed():
    workflow = (ROOT / ".github/workflows/test.yml").read_text()
    tested = dict(re.findall(r"(numpy|h5py|torch)==([\d.]+)", workflow))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {f"{name}>={version.removesuffix('.0')}" for name, version in tested.items()}
    assert len(tested) == 3 and needed <= {*project["dependencies"]}
