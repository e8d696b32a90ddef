"""A run on many files: the bits of one file, on any ranks, resumed, and on the same files alone."""

from __future__ import annotations

import json
import os
import re
import shutil

import h5py
import numpy as np
import pytest

from tests.support.external import write
from tests.support.launches import check_same, launch, notes, run_of
from tests.support.ranks import command
from tests.support.refused import check_refused
from tests.support.short import images, records

FILES, SHAPE, CLASSES = 40, (12, 12, 1), 4
SIZES = [2, 3, pytest.param(5, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)]
WAYS = {
    "partition": {},
    "global": {"shuffle": "global"},
    "blocks": {"shuffle": "blocks", "read_buffer": "1K"},
    "groups": {"group": "file"},
}


def write_files(folder):
    """Files of 1 to 9 rows each."""
    rows = np.random.default_rng(0).integers(1, 10, FILES).tolist()
    stored, labels = images(sum(rows), SHAPE, CLASSES)
    folder.mkdir()
    for number, first in enumerate(np.cumsum([0, *rows[:-1]]).tolist()):
        part = slice(first, first + rows[number])
        write(folder / f"{number:02}.h5", stored[part], labels[part])
    return stored, labels


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Settings of two epochs over a set of files, and over one file with the same rows."""
    folder = tmp_path_factory.mktemp("sets")
    stored, labels = write_files(folder / "scans")
    write(folder / "one.h5", stored, labels)
    files = {"data": str(folder / "scans/*.h5"), "runs_dir": str(folder / "runs")}
    files |= {"cache_dir": str(folder / "cache"), "images": "x", "labels": "y"}
    how = {"model": "digits", "epochs": 2, "batch_size": 32, "threads": 1, "progress": "none"}
    how |= {"split": "0.6,0.2,0.2", "shards": 8, "deterministic": True}
    return files | how | {"normalize": "pack"}


@pytest.fixture(scope="module")
def whole(base):
    """The runs of each way, on one rank."""
    for way, settings in WAYS.items():
        assert launch(base | settings | {"run": way}, 1).code == 0
    return base


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("way", WAYS)
def test_a_set_has_the_same_bits_on_any_number_of_ranks(whole, way, size):
    settings = whole | WAYS[way] | {"run": f"{way} on {size}"}
    assert launch(settings, size).code == 0
    check_same(settings, whole | {"run": way})


@pytest.mark.parametrize("way", ["partition", "global"])
def test_a_set_has_the_bits_of_one_file_with_the_same_rows(whole, way):
    one = whole | WAYS[way] | {"data": whole["data"].replace("scans/*", "one"), "run": f"one {way}"}
    assert launch(one, 2).code == 0
    check_same(one, whole | {"run": way})
    assert json.loads((run_of(whole | {"run": way}) / "files.json").read_text())["00.h5"][0] > 0
    assert not (run_of(one) / "files.json").exists()
    (note,) = [text for text in notes(whole | {"run": way}) if text.startswith("/x of 40 files")]
    assert "12 rows x 12 columns x 1 channel" in note


@pytest.fixture
def copy(base, tmp_path):
    """Settings of a run on a copy of the files; the function that interrupts it at a step."""
    shutil.copytree(os.path.dirname(base["data"]), tmp_path / "scans")
    data = {"data": str(tmp_path / "scans/*.h5"), "runs_dir": str(tmp_path / "runs")}
    settings = base | data | {"cache_dir": str(tmp_path / "cache"), "run": "a"}
    assert launch(settings, 2, leave=3).status == "preempted"
    return settings, tmp_path / "scans"


@pytest.mark.parametrize("size", [1, 3])
def test_a_run_on_a_set_is_resumed_by_a_copy_of_its_files(whole, copy, size):
    settings, folder = copy
    shutil.copytree(folder, folder.parent / "moved", copy_function=shutil.copyfile)  # other times
    shutil.rmtree(folder)
    settings |= {"data": str(folder.parent / "moved/*.h5")}
    assert launch(settings, size).code == 0
    check_same(settings, whole | {"run": "partition"})
    assert any("40 of 40 files were written since" in text for text in notes(settings))


def change(folder):
    with h5py.File(folder / "07.h5", "r+") as file:
        file["x"][0] += 1


def lose(folder):
    for number in (3, 12):
        (folder / f"{number:02}.h5").unlink()


def add(folder):
    shutil.copy(folder / "07.h5", folder / "x.h5")


@pytest.mark.parametrize(
    ("happens", "named"),
    [
        (change, "1 file changed: 07.h5"),
        (lose, "2 files missing: 03.h5, 12.h5"),
        (add, "1 file added: x.h5"),
    ],
)
def test_a_run_is_resumed_on_the_files_with_which_it_began(copy, happens, named):
    settings, folder = copy
    happens(folder)
    for _ in range(2):
        ended = launch(settings, 2)
        assert (ended.code, named in ended.error) == (2, True), ended
    assert records(settings)[-1]["kind"] == "end"


def test_evaluate_and_predict_read_the_set_of_the_training(whole, tmp_path):
    model = run_of(whole | {"run": "groups"})
    cache = ["--cache-dir", whole["cache_dir"]]
    ended = command(2, "evaluate", model, "--output", tmp_path / "test.json", *cache)
    assert ended.code == 0, ended.err
    found = json.loads((tmp_path / "test.json").read_text())
    expected = records(whole | {"run": "groups"}, "evaluation")[-1]
    assert (found["rows"], found["loss"]) == (expected["rows"], expected["loss"])
    table = tmp_path / "a.csv"
    ended = command(2, "predict", model, "--split", "validation", "--output", table, *cache)
    assert ended.code == 0, ended.err
    rows = [line.split(",") for line in table.read_text().splitlines()]
    place = rows[0].index("source")
    assert all(row[place].startswith("scans/") and ".h5:/x[" in row[place] for row in rows[1:])
    files = {row[place].partition(":")[0] for row in rows[1:]}
    ended = command(1, "predict", model, "--split", "test", "--output", table, *cache)
    rows = [line.split(",") for line in table.read_text().splitlines()]
    assert not files & {row[place].partition(":")[0] for row in rows[1:]}  # --group file
    one_file = os.path.join(os.path.dirname(os.path.dirname(whole["data"])), "one.h5")
    ended = command(1, "evaluate", model, "--data", one_file, *cache)
    assert ended.code == 0, ended.err
    tested = re.findall(r"test: (\d+) images", ended.out)
    shares = re.findall(r"one\.h5: (\d+) of (\d+) images are its split test", ended.err)
    assert [share for share, _ in shares] == tested, ended
    assert int(shares[0][0]) < int(shares[0][1])


def test_the_header_names_a_set_with_its_folder(base, tmp_path):
    flags = ["--images", "x", "--labels", "y", "--epochs", "1", "--cache-dir", base["cache_dir"]]
    ended = command(1, "train", "--data", base["data"], *flags, "--runs-dir", tmp_path)
    assert ended.code == 0, ended.err
    assert "\n  scans/*.h5: " in ended.out


REFUSED = {
    "--images x --labels y --data scans": "/scans/*.h5'",
    "--images x --labels y --data none*.h5": "none*.h5: no file matches",
    "--data scans/*.h5": "stands for HDF5 files that are no packs: it needs --images",
    "--images x --labels y --data scans/*.h5 --stage local": "--stage",
    "--images x --labels y --data one.h5 --group file": "--group file",
    "--images x --labels z --data scans/*.h5": "00.h5: there is no dataset 'z'",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_a_set_cannot_do_is_refused_in_one_line(base, tmp_path, words):
    folder = os.path.dirname(os.path.dirname(base["data"]))
    flags = ["--runs-dir", tmp_path / "runs", "--cache-dir", tmp_path / "cache", "--epochs", "1"]
    given = [f"{folder}/{w}" if w.endswith(("h5", "scans")) else w for w in words.split()]
    ended = command(1, "train", *given, *flags)
    check_refused(ended, [REFUSED[words]])


def test_a_pattern_that_the_shell_expanded_is_told():
    ended = command(1, "train", "--data", "a.h5", "b.h5", "c.h5", "--images", "x", "--labels", "y")
    check_refused(ended, ["'b.h5'", "quotes"])
