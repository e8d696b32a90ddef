"""Tables with several classes of an image, or with values: from the cells to the pack.

How classes (`label`), splits and groups are read is in test_sources.py and test_splits.py.
"""

import shlex
import unicodedata
import zlib

import h5py
import numpy as np
import pytest

from tests.support.api import command_line
from tests.support.pictures import arrays, class_folders, facts, make_pack, picture, splits

UNKNOWN = 255
NAN = float("nan")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """60 images of 4 x 3 pixels in one folder."""
    root = tmp_path_factory.mktemp("source")
    return class_folders(root, {"x": 60}, width=4, height=3)


@pytest.fixture
def write(images, tmp_path):
    """Write a table beside the images; `{}` in it are their paths, one after the other."""

    def write_table(text, name="table.csv", encoding="utf-8"):
        paths = [f"x/{number:03}.png" for number in range(text.count("{}"))]
        (images / name).write_bytes(text.format(*paths).encode(encoding))
        return images / name

    return write_table


def targets(path):
    """The target of each picture of a pack, by number, and the kind of them all."""
    known = {picture(n, 4, 3).tobytes(): n for n in range(60)}
    found = {}
    for name in splits(path):
        for image, target in zip(*arrays(path, name), strict=True):
            found[known[image.tobytes()]] = target.tolist()
    with h5py.File(path) as file:
        return dict(sorted(found.items())), file.attrs["targets"].decode()


# Several classes


LABELS = """path,Labels,unknown
{},b;a,
{}, a ; a;,c
{},,
{},?b;c,a;?d
{},d;"10",b
"""


def test_a_cell_lists_the_classes_of_an_image_and_what_is_unknown(write, tmp_path, capfd):
    path = make_pack(write(LABELS.replace('"10"', "10")), tmp_path / "a.h5", split="1")
    found, kind = targets(path)
    assert facts(path)["classes"] == ["10", "a", "b", "c", "d"]
    assert kind == '{"kind": "classes"}'
    assert found == {
        0: [0, 1, 1, 0, 0],
        1: [0, 1, 0, UNKNOWN, 0],
        2: [0, 0, 0, 0, 0],
        3: [0, UNKNOWN, UNKNOWN, 1, UNKNOWN],
        4: [1, 0, UNKNOWN, 0, 1],
    }
    assert "own" not in capfd.readouterr().err


def test_the_order_of_classes_is_that_of_labels_and_equal_forms_are_one_class(
    write, tmp_path, capfd
):
    text = "path,labels\n{},10;9\n{},2\n"
    numbers = make_pack(write(text), tmp_path / "a.h5", split="1")
    assert facts(numbers)["classes"] == ["2", "9", "10"]
    forms = [unicodedata.normalize(form, "é") for form in ("NFC", "NFD")]
    capfd.readouterr()
    rows = ("{}," + forms[0] + ";Cat", "{},?" + forms[1] + ";cat", "{}," + forms[1])
    path = make_pack(write("path,labels\n" + "\n".join(rows)), tmp_path / "b.h5", split="1")
    assert targets(path)[0] == {0: [1, 0, 1], 1: [0, 1, UNKNOWN], 2: [0, 0, 1]}
    said = capfd.readouterr().err
    assert "are one class: é\n" in said and "of their own: 'Cat', 'cat'\n" in said


def test_each_sample_has_a_checksum_of_its_image_and_its_target(write, tmp_path, capfd):
    rows = "".join(f"{{}},{'a' * (n % 2)};{'b' * (n % 3 == 0)},{n / 7}\n" for n in range(20))
    table = write("path,labels,size\n" + rows)
    for name, settings in {"classes": {}, "values": {"targets": "size"}}.items():
        path = make_pack(table, tmp_path / f"{name}.h5", split="1", **settings)
        images, stored = arrays(path)
        with h5py.File(path) as file:
            sums = file["train/crc32"][:].tolist()
        assert sums == [
            zlib.crc32(image.tobytes(), zlib.crc32(target.tobytes()))
            for image, target in zip(images, stored, strict=True)
        ]
        assert command_line(["pack", "--check", str(path)]) == 0
        with h5py.File(path, "r+", locking=False) as file:
            file["train/targets"][3] = 1 - stored[3]
        capfd.readouterr()
        assert command_line(["pack", "--check", str(path)]) == 1
        assert "sample 3 of split 'train'" in capfd.readouterr().err


def test_names_that_look_like_lists_and_many_classes_are_said(write, tmp_path, capfd):
    many = ";".join(map(str, range(1500)))
    rows = ("{},a|b;x", "{},x", "{}," + many)
    make_pack(write("path,labels\n" + "\n".join(rows)), tmp_path / "a.h5", split="1")
    said = capfd.readouterr().err
    assert "names with '|' are one class each: a|b\n" in said
    assert "1,502 classes: the targets of all images take 4.4 KiB" in said


@pytest.mark.parametrize(
    ("column", "names", "advice"),
    [
        ("labels", "No Finding, nan", "leave the cell empty"),
        ("label", "nan", "leave out the lines of images whose class is unknown"),
    ],
)
def test_names_that_stand_for_no_class_are_said(write, tmp_path, capfd, column, names, advice):
    text = f"path,{column}\n{{}},a\n{{}},No Finding\n{{}},nan\n{{}},b\n"
    make_pack(write(text), tmp_path / "a.h5", split="1")
    said = capfd.readouterr().err
    assert f"classes like any others: {names}; " in said and advice in said


def test_that_each_image_has_one_class_is_said(write, tmp_path, capfd):
    make_pack(write("path,labels\n{},a\n{},b\n"), tmp_path / "a.h5", split="1")
    assert "each image has exactly one class: " in capfd.readouterr().err
    make_pack(write("path,labels\n{},a\n{},b;?a\n"), tmp_path / "b.h5", split="1")
    assert "exactly one" not in capfd.readouterr().err


# Values


def test_numbers_are_kept_as_float32_and_missing_ones_are_unknown(write, tmp_path, capfd):
    text = (
        "sep=\t\nMass\tPATH\tage\tsplit\n-1e-3\t{}\t.1\ttrain\n NA \t{}\t 20. \ttrain\n"
        "<NA>\t{}\t1E5\ttest\n\t{}\tnan\ttrain\nN/A\t{}\t+7\ttest\n3\t{}\tnull\ttrain\n"
    )
    path = make_pack(write(text, "t.tsv", "utf-16"), tmp_path / "a.h5", targets="age,Mass")
    found, kind = targets(path)
    assert kind == '{"kind": "values", "columns": ["age", "Mass"]}'
    expected = [[0.1, -1e-3], [20, NAN], [1e5, NAN], [NAN, NAN], [7, NAN], [NAN, 3]]
    np.testing.assert_array_equal(np.array([*found.values()]), np.float32(expected))
    assert facts(path)["classes"] == [] and arrays(path)[1].dtype == np.float32
    assert "rounded" not in capfd.readouterr().err


def test_the_table_of_a_pack_shows_the_range_of_values_and_what_is_unknown(write, tmp_path, capfd):
    make_pack(
        write("path,a,b\n{},1,\n{},2,5\n{},6,NA\n"), tmp_path / "a.h5", split="1", targets="a,b"
    )
    said = capfd.readouterr().out
    rows = [" ".join(line.split()) for line in said.replace("│", " ").splitlines()]
    assert "a 1 to 6 1 to 6 3 0" in rows and "b 5 to 5 5 to 5 5 2" in rows
    make_pack(write("path,labels\n{},a\n{},b;?a\n{},b\n"), tmp_path / "b.h5", split="1")
    rows = [line.split() for line in capfd.readouterr().out.replace("│", " ").splitlines()]
    assert ["a", "1", "1", "1"] in rows and ["b", "2", "2", "0"] in rows


def test_whole_numbers_that_are_rounded_and_columns_that_are_not_read_are_said(
    write, tmp_path, capfd
):
    text = "path,label,id,n\n{},a,16777217,16777218\n{},b,16777219,5\n"
    make_pack(write(text), tmp_path / "a.h5", split="1", targets="id,n")
    said = capfd.readouterr().err
    assert "up to 16,777,216: id (2 values)\n" in said
    assert "not read, since --targets names others: label of " in said


def test_columns_of_0_and_1_may_be_meant_as_classes(write, tmp_path, capfd):
    for number, cells in enumerate(("1,0,2", "1,-1,0", "1,0,0")):
        text = f"path,a,b,n\n{{}},0,1,1\n{{}},,1,0\n{{}},{cells}\n"
        make_pack(write(text), tmp_path / f"{number}.h5", split="1", targets="a,b,n")
        names = "a, b" if "2" in cells else "a, b, n"
        assert f"no others than 0, 1, -1: {names}; if they say" in capfd.readouterr().err


def test_a_table_of_values_needs_no_suffix(write, tmp_path):
    table = write("path,age\n{},3\n{},5\n", "patients")
    assert targets(make_pack(table, tmp_path / "a.h5", split="1", targets="age"))[0][1] == [5]


def test_a_label_may_be_a_value(write, tmp_path, capfd):
    path = make_pack(
        write("path,label\n{},3\n{},5\n"), tmp_path / "a.h5", split="1", targets="label"
    )
    assert targets(path)[0] == {0: [3], 1: [5]} and "not read" not in capfd.readouterr().err


# How images are packed does not depend on the kind


KINDS = {"classes": {}, "values": {"targets": "n"}}


@pytest.mark.parametrize("kind", KINDS)
def test_jpeg_files_tiles_and_several_processes(write, tmp_path, capfd, kind):
    rows = "".join(f"{{}},{'ab'[n % 2]};c,{n}\n" for n in range(40))
    table = write("path,labels,n\n" + rows)
    settings = {"split": "0.5,0.5", **KINDS[kind]}
    one = make_pack(table, tmp_path / "1.h5", **settings)
    assert make_pack(table, tmp_path / "2.h5", jobs=2, **settings).read_bytes() == one.read_bytes()
    jpeg = make_pack(table, tmp_path / "3.h5", encoding="jpeg", size="8x8", **settings)
    capfd.readouterr()
    tiled = make_pack(table, tmp_path / "4.h5", tiles="2x3", **settings)
    said = capfd.readouterr().err
    assert ("each tile has the values of its file" in said) == (kind == "values")
    for path in (jpeg, tiled):
        assert command_line(["pack", "--check", str(path)]) == 0
    stored = [arrays(one, name)[1].tolist() for name in ("train", "test")]
    tiles = [target for name in ("train", "test") for target in arrays(tiled, name)[1].tolist()]
    assert sorted(tiles) == sorted(2 * (stored[0] + stored[1]))
    for name, expected in zip(("train", "test"), stored, strict=True):
        with h5py.File(jpeg) as file:
            assert file[f"{name}/targets"][:].tolist() == expected


def test_equal_files_with_other_targets_are_named_first(images, write, tmp_path, capfd):
    (images / "x/copy.png").write_bytes((images / "x/000.png").read_bytes())
    (images / "x/same.png").write_bytes((images / "x/001.png").read_bytes())
    rows = ["{},a,1", "{},a;b,2", "x/copy.png,a;b,", "x/same.png,?a;b,2", "{},,5"]
    table = write("path,labels,n\n" + "\n".join(rows) + "\n")
    make_pack(table, tmp_path / "a.h5", split="1")
    said = capfd.readouterr().err
    first = (
        "contradictory labels: 1 group of equal files with other labels: x/000.png = x/copy.png\n"
    )
    assert first in said and "4 files in 2 groups are equal" in said
    make_pack(table, tmp_path / "b.h5", split="1", targets="n")
    assert "contradictory" not in capfd.readouterr().err  # what is unknown contradicts nothing
    table.write_text(table.read_text().replace("a;b,\n", "a;b,7\n"))
    make_pack(table, tmp_path / "c.h5", split="1", targets="n")
    said = capfd.readouterr().err
    assert "contradictory values: 1 group of equal files with other values: x/000.png = " in said


GROUPED = [(n, "ab"[: n % 3], n % 7, n % 12) for n in range(60)]  # number, classes, value, group


@pytest.mark.parametrize("kind", KINDS)
def test_splits_are_stratified_and_divide_no_group(write, tmp_path, kind):
    rows = "".join(f"{{}},{';'.join(names)},{value}\n" for _, names, value, _ in GROUPED)
    table = write("path,labels,n\n" + rows)
    path = make_pack(table, tmp_path / "a.h5", split="0.5,0.2,0.3", **KINDS[kind])
    count = {name: len(arrays(path, name)[1]) for name in splits(path)}
    assert count == {"train": 30, "validation": 12, "test": 18}
    if kind == "classes":
        present = {name: arrays(path, name)[1].sum(0).tolist() for name in splits(path)}
        assert present == {"train": [20, 10], "validation": [8, 4], "test": [12, 6]}
    else:
        means = [arrays(path, name)[1].mean() for name in splits(path)]
        assert max(means) - min(means) < 0.5
    rows = "".join(f"{{}},{';'.join(names)},{value},{of}\n" for _, names, value, of in GROUPED)
    table.write_text("path,labels,n,group\n" + rows.format(*(f"x/{n:03}.png" for n in range(60))))
    held_out = []
    for number in (1, 2, 3):
        fold = tmp_path / f"{number}.h5"
        make_pack(table, fold, fold=f"{number}/3", **KINDS[kind])
        found = {name: placed_in(fold, name) for name in splits(fold)}
        assert found.keys() == {"train", "test"}
        groups = {name: {GROUPED[n][3] for n in numbers} for name, numbers in found.items()}
        assert not groups["train"] & groups["test"]
        held_out += found["test"]
    assert sorted(held_out) == [*range(60)]


def placed_in(path, name):
    """The numbers of the pictures in a split."""
    known = {picture(n, 4, 3).tobytes(): n for n in range(60)}
    return [known[image.tobytes()] for image in arrays(path, name)[0]]


def test_classes_that_a_split_lacks_are_said_and_train_has_values(write, tmp_path, refusal, capfd):
    text = "path,labels,n,split\n{},a,1,train\n{},a;b,,train\n{},b;c,2,test\n"
    make_pack(write(text), tmp_path / "a.h5")
    assert "train has no image of 1 of 3 classes: c (1 image)\n" in capfd.readouterr().err
    swapped = text.replace("1,train", ",train").replace("a;b", "a;?c").replace("},a,", "},a;?c,")
    for name, settings in {"column n": {"targets": "n"}, "class c": {}}.items():
        said = refusal(write(swapped), **settings)
        assert name in said and "unknown in all 2 images of train" in said
    for settings in KINDS.values():
        assert "no image for train" in refusal(write(text.replace("train", "test")), **settings)


# Mistakes


REFUSED = {  # a table, --targets, and what the error names
    "label and labels": ("path,label,labels\n{},a,a;b\n", None, "label labels rename"),
    "no targets": ("path,age,mass\n{},1,2\n", None, "age mass label labels --targets"),
    "labels twice": ("path,labels,Labels\n{},a,b\n", None, "several labels"),
    "? alone": ("path,labels\n{},a\n{},?;a\n", None, "'line 3' ?a"),
    "known and unknown": ("path,labels,unknown\n{},a;b,b\n", None, "'line 2' b unknown"),
    "no class at all": ("path,labels\n{},\n{},;\n", None, "labels class"),
    "only unknown": ("path,labels\n{},a;?c\n{},a;?Dog;?c\n{},?Dog\n", None, "c Dog 'line 2, 3'"),
    "semicolons": ("path;labels\n{};a;b\n", None, "'line 2' cells quotation"),
    "a missing mark": ('path,labels\n{},"a\n{},b\n', None, "'end of data'"),
    "no such column": ("path,age\n{},1\n", "agee", "agee age 'did you mean'"),
    "of other case": ("path,Age\n{},1\n", "age", "age 'did you mean' Age"),
    "a column twice": ("path,age,age\n{},1,2\n", "age", "several age"),
    "all unknown": ("path,age,mass\n{},1,\n{},2,NA\n", "age,mass", "mass unknown"),
    "text": ("path,age\n{},1\n{},old\n{},1_0\n", "age", "'2 cells' 'line 3' old 'line 4' 1_0"),
    "infinity": (
        "path,age\n{},1\n{},-inf\n{},1e39\n{},1e-39\n",
        "age",
        "'3 cells' -inf 1e39 1e-39",
    ),
    "a decimal comma": ("path;age\n{};1,5\n", "age", "1,5 decimal point"),
    "many": ("path,age\n" + "{},x\n" * 12, "age", "'12 cells' 'line 11' 'and 2 more'"),
    "no images": ("path,labels\n", None, "no images"),
    "no path": ("file,labels\n{},a\n", None, "path labels"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_a_target_is_refused_in_one_line(write, refusal, case):
    text, columns, words = REFUSED[case]
    settings = {} if columns is None else {"targets": columns}
    said = refusal(write(text), split="1", **settings)
    assert "table.csv" in said
    missing = [word for word in shlex.split(words) if word not in said]
    assert not missing, said


def test_columns_of_no_table_are_refused(images, refusal):
    assert "--manifest" in refusal(images, targets="age")
    assert "--targets does not apply" in refusal("digits", targets="age")
    assert "age,mass" in refusal(images, targets="age,age")


def test_a_class_or_column_without_a_readable_image_is_refused(images, write, refusal):
    (images / "x/bad.png").write_bytes(b"")
    text = "path,labels,n\n{},a,1\n{},a,2\nx/bad.png,b,3\n"
    said = refusal(write(text), split="1", skip_bad=True)
    assert "class b of " in said and "none of its 1 file" in said
    text = "path,m,n\n{},,1\n{},,2\nx/bad.png,5,3\n"
    said = refusal(write(text), split="1", skip_bad=True, targets="n,m")
    assert "column m of " in said and "none of its 1 file" in said
