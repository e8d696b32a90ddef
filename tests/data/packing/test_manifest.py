"""Tables that give labels, splits and groups; folds; what a pack says of its splits."""

import numpy as np
import pytest

from hpctrain.cli import main as command
from hpctrain.config import fold_number, split_shares
from hpctrain.data.packing.manifest import read_manifest
from hpctrain.data.packing.split import (
    assign,
    fold_as_given,
    merged,
)
from hpctrain.errors import UsageError
from tests.data.pictures import class_folders, contents, counts, pack, picture, tar, zipped


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """60 images in one folder; the manifests say more."""
    root = tmp_path_factory.mktemp("source") / "images"
    return class_folders(root, {"x": 60}).rename(root.parent / "scans")


def table(path, rows, header="path,label", separator=","):
    """A manifest of these rows."""
    lines = [header, *(",".join(map(str, row)) for row in rows)]
    path.write_text("\n".join(lines).replace(",", separator) + "\n")
    return path


def name(number):
    return f"x/{number:03}.png"


def who_is_where(made):
    """Number of the image -> split and class."""
    known = {picture(number).tobytes(): number for number in range(60)}
    return {
        known[image.tobytes()]: (split, made.classes[label])
        for split in made.splits
        for image, label in zip(*contents(made, split), strict=True)
    }


@pytest.mark.parametrize("separator", [",", ";", "\t"])
@pytest.mark.parametrize(
    "make", [lambda path, root: root, zipped, tar], ids=["folder", "zip", "tgz"]
)
def test_a_manifest_labels_the_images_of_any_source(images, tmp_path, make, separator):
    rows = [(name(i), 10 - i % 2 * 8) for i in range(50)]  # ten images are not in it
    file = table(tmp_path / "labels.csv", rows, "\ufeffPath,LABEL", separator)
    source = make(tmp_path / "archive", images)
    made = pack(source, tmp_path / "a.h5", manifest=str(file))
    assert made.classes == ("2", "10")  # in numerical order
    found = who_is_where(made)
    assert {number: label for number, (_, label) in found.items()} == {
        i: str(10 - i % 2 * 8) for i in range(50)
    }
    assert (
        counts(made) == {"train": [23, 22], "test": [2, 3]}
        or sum(map(sum, counts(made).values())) == 50
    )
    assert made.provenance["split_by"] == "seed"


def test_a_manifest_is_a_source_of_its_own_and_gives_splits(images, tmp_path, capfd):
    names = ("Training", "val", "test_data")
    rows = [(images / name(i), "ab"[i % 2], names[i % 3]) for i in range(60)]
    file = table(tmp_path / "labels.csv", rows, "path,label,split")
    made = pack(file, tmp_path / "a.h5")
    splits = ("train", "validation", "test")
    assert who_is_where(made) == {i: (splits[i % 3], "ab"[i % 2]) for i in range(60)}
    assert command(["pack", "--check", made.path]) == 0
    assert "split  given by the manifest" in capfd.readouterr().out


def groups_of(rows, made):
    """The splits in which the images of each group are."""
    found = {}
    for number, (split, _) in who_is_where(made).items():
        found.setdefault(rows[number][2], set()).add(split)
    return found


@pytest.mark.parametrize("seed", range(3))
def test_groups_are_never_divided_and_classes_are_even(images, tmp_path, seed, capfd):
    rows = [(name(i), "ab"[i // 5 % 2], f"patient {i // 5}") for i in range(60)]
    file = table(tmp_path / "labels.csv", rows, "path,label,group")
    settings = {"manifest": str(file), "seed": seed, "split": "0.5,0.2,0.3"}
    made = pack(images, tmp_path / "a.h5", **settings)
    assert {len(splits) for splits in groups_of(rows, made).values()} == {1}
    for split, share in (("train", 15), ("validation", 6), ("test", 9)):
        assert all(abs(count - share) <= 5 for count in counts(made)[split])
    assert command(["pack", "--check", made.path]) == 0
    assert "drawn: 0.5,0.2,0.3 of each class, no group divided" in capfd.readouterr().out
    alone = pack(
        images,
        tmp_path / "b.h5",
        **{**settings, "manifest": str(table(tmp_path / "alone.csv", [row[:2] for row in rows]))},
    )
    assert {len(splits) for splits in groups_of(rows, alone).values()} != {1}


def test_folds_hold_out_every_image_once(images, tmp_path, capfd):
    rows = [(name(i), "abc"[i % 3], i // 2) for i in range(60)]
    file = table(tmp_path / "labels.csv", rows, "path,label,group")
    held_out = []
    for fold in range(1, 5):
        made = pack(
            images,
            tmp_path / f"{fold}.h5",
            manifest=str(file),
            fold=f"{fold}/4",
            split="0.8,0.1,0.1",
        )
        found = who_is_where(made)
        assert len(found) == 60 and set(made.splits) == {"train", "validation", "test"}
        assert {len(splits) for splits in groups_of(rows, made).values()} == {1}
        held_out += [number for number, (split, _) in found.items() if split == "test"]
        assert all(3 <= count <= 7 for count in counts(made)["test"])
    assert sorted(held_out) == list(range(60))
    assert made.provenance["fold"] == "4/4"
    assert command(["pack", "--check", made.path]) == 0
    assert "split  drawn: fold 4/4, stratified, no group divided" in capfd.readouterr().out


def test_a_fold_of_a_given_train_is_validation(tmp_path, capfd):
    root = class_folders(tmp_path / "images" / "training_data", {"a": 20, "b": 20}).parent
    class_folders(root / "testing_data", {"a": 3, "b": 4}, width=17)
    made = pack(root, tmp_path / "a.h5", size="13x11", fold="2/5")
    assert counts(made) == {"train": [16, 16], "validation": [4, 4], "test": [3, 4]}
    assert command(["pack", "--check", made.path]) == 0
    assert "split  given by the folders, fold 2/5 of the others" in capfd.readouterr().out
    drawn = pack(root, tmp_path / "b.h5", size="13x11", split="0.8,0.1,0.1")
    assert counts(drawn)["validation"] == [2, 2]
    assert command(["pack", "--check", drawn.path]) == 0
    said = capfd.readouterr().out
    assert "split  given by the folders but for validation, which was drawn" in said
    class_folders(root / "val", {"a": 3, "b": 4}, width=15)
    with pytest.raises(UsageError, match="the source gives a validation split"):
        pack(root, tmp_path / "c.h5", size="13x11", fold="2/5")


def test_large_groups_go_to_all_splits():
    """Not to train alone because they are placed first."""
    groups = np.concatenate([np.repeat(np.arange(20), 10), 20 + np.repeat(np.arange(100), 2)])
    splits = assign(np.zeros(400, int), split_shares("0.5,0.5"), 0, None, groups, balanced=True)
    assert [(splits == split).sum() for split in (0, 2)] == [200, 200]
    assert {len(set(splits[groups == group])) for group in range(120)} == {1}
    assert (splits[:200] == 0).sum() == 100


def test_folds_are_even_in_sets_of_many_classes():
    labels = np.repeat(np.arange(100), 7)
    nothing, alone = np.full(700, -1, np.int8), np.arange(700)
    sizes = [(fold_as_given(labels, nothing, alone, (k, 5), 0) == 2).sum() for k in range(1, 6)]
    assert sizes == [140] * 5
    for text in ("5", "0/5", "6/5", "1/1", "a/b", "1/2/3", "-1/5", "1/"):
        with pytest.raises(UsageError, match="give K/N"):
            fold_number(text)


def test_groups_connect_what_equal_pixels_connect():
    pixels = np.array([0, 1, 1, 2, 3, 4, 5])
    groups = np.array([7, 7, -1, -1, 9, 9, -1])
    found = merged(pixels, groups)
    assert found[0] == found[1] == found[2] and found[4] == found[5]
    assert len(set(found.tolist())) == 4
    chain = np.arange(100) // 2
    assert len(set(merged(chain, np.roll(chain, 1)).tolist())) == 1


MISTAKES = {
    "path,class\na,b\n": "has no column label, only path, class: name its columns path, label",
    "": "has no column path and no column label, only none",
    "path,label\n": "names no images",
    "path,label\na,\n": "row 2 has no label",
    "path,label\na,b\n,b\n": "row 3 has no path",
    "path,label\na,b\nc,b\na,d\n": "rows 2 and 4 both name a",
    "path,label\na,b\nc,b\n./a,d\n": "rows 2 and 4 both name a",
    "path,label,label\na,b,c\n": "has 2 columns label: leave one",
    "path,label\na,b\nc,d,e\n": "row 3 has 3 cells, the header 2",
    "path,label,split\na,b,train\nc,b,holdout\n": "row 3 has the split 'holdout': give train, val",
    "path,label,split\na,b,train\nc,b\n": "row 3 has no split, other rows have one",
    "path,label,split,group\na,b,train,1\nc,b,test,1\n": "row 3: group '1' is in both train and t",
    "path,label\n" + "x" * 200_000 + ",b\n": "is no CSV file: field larger than field limit",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_mistakes_in_a_manifest_name_the_row(tmp_path, text):
    (tmp_path / "labels.csv").write_text(text)
    with pytest.raises(UsageError) as caught:
        read_manifest(tmp_path / "labels.csv")
    said = str(caught.value)
    assert MISTAKES[text] in said and "\n" not in said and str(tmp_path / "labels.csv") in said


def test_images_that_are_not_there(images, tmp_path, capfd):
    rows = [(name(i), "ab"[i % 2]) for i in range(50)]
    file = table(tmp_path / "labels.csv", [*rows, ("x/none.png", "a")])
    with pytest.raises(UsageError, match="1 of 51 files cannot be read"):
        pack(images, tmp_path / "a.h5", manifest=str(file))
    assert "unreadable: x/none.png: No such file" in capfd.readouterr().err
    made = pack(images, tmp_path / "a.h5", manifest=str(file), skip_bad=True)
    assert made.provenance["skipped"] == {"files": 1, "names": ["x/none.png"]}
    archive = zipped(tmp_path / "a.zip", images)
    with pytest.raises(UsageError, match="names 1 images that the archive does not hold.*none.png"):
        pack(archive, tmp_path / "b.h5", manifest=str(file))
    other = table(tmp_path / "other.csv", [(f"x/{name(i)}", "ab"[i % 2]) for i in range(50)])
    with pytest.raises(UsageError, match="names 50 images that the archive does not hold"):
        pack(archive, tmp_path / "b.h5", manifest=str(other))
    with pytest.raises(UsageError, match="manifest .* cannot be read: No such file"):
        pack(images, tmp_path / "c.h5", manifest=str(tmp_path / "gone.csv"))
    with pytest.raises(UsageError, match="--manifest does not apply to digits"):
        pack("digits", tmp_path / "c.h5", manifest=str(file))
