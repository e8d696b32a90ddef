"""How images are divided: manifests, groups, folds and stratified shares.

Mistakes in manifests are in tests/contract/test_refused.py.
"""

from fractions import Fraction

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hpctrain as hp
from tests.support.api import ExternalOptions, command_line, read_external
from tests.support.pictures import (
    class_folders,
    command_words,
    counts,
    facts,
    make_pack,
    placed,
    tar,
    zipped,
)

SPLITS = ("train", "validation", "test")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """60 images in one folder; the manifests say more."""
    root = tmp_path_factory.mktemp("source") / "images"
    return class_folders(root, {"x": 60}, width=4, height=3).rename(root.parent / "scans")


def table(path, rows, header="path,label", separator=","):
    """A manifest of these rows."""
    lines = [header, *(",".join(map(str, row)) for row in rows)]
    path.write_text("\n".join(lines).replace(",", separator) + "\n")
    return path


def name(number):
    return f"x/{number:03}.png"


# Manifests


@pytest.mark.parametrize("separator", [",", ";", "\t"])
@pytest.mark.parametrize("kind", ["folder", "zip", "tgz"])
def test_a_manifest_labels_the_images_of_any_source(images, tmp_path, capfd, kind, separator):
    rows = [(name(i), 10 - i % 2 * 8) for i in range(50)]  # ten images are not in it
    manifest = table(tmp_path / "labels.csv", rows, "\ufeffPath,LABEL", separator)
    make = {"folder": lambda path, root: root, "zip": zipped, "tgz": tar}[kind]
    path = make_pack(make(tmp_path / "x", images), tmp_path / "a.h5", manifest=manifest)
    assert facts(path)["classes"] == ["2", "10"]  # in numerical order
    found = {number: label for number, (_, label) in placed(path).items()}
    assert found == {i: str(10 - i % 2 * 8) for i in range(50)}
    assert facts(path)["provenance"]["split_by"] == "seed"
    listed = "since not in the table: 10 files (x/050.png, " in capfd.readouterr().err
    assert listed == (kind != "folder")  # which is not listed


def test_a_manifest_is_a_source_of_its_own_and_gives_splits(images, tmp_path):
    names = ("Training", "val", "test")
    rows = [(images / name(i), "ab"[i % 2], names[i % 3]) for i in range(60)]
    path = make_pack(table(tmp_path / "labels.csv", rows, "path,label,split"), tmp_path / "a.h5")
    assert placed(path) == {i: (SPLITS[i % 3], "ab"[i % 2]) for i in range(60)}


@settings(max_examples=25)
@given(
    labels=st.lists(st.integers(0, 2), min_size=30, max_size=60),
    groups=st.lists(st.integers(0, 14), min_size=60, max_size=60),
    seed=st.integers(0, 10**6),
    folds=st.sampled_from([0, 2, 3, 5]),
)
def test_groups_are_never_divided_and_folds_hold_out_every_image_once(
    images, tmp_path_factory, labels, groups, seed, folds
):
    labels[:3] = 0, 1, 2
    folder = tmp_path_factory.mktemp("groups")
    rows = [(name(i), label, groups[i]) for i, label in enumerate(labels)]
    manifest = table(folder / "labels.csv", rows, "path,label,group")
    held_out = []
    for fold in range(1, folds + 1) or [0]:
        how = {"fold": f"{fold}/{folds}"} if folds else {"split": "0.5,0.2,0.3"}
        words = command_words(images, folder / "a.h5", manifest=manifest, seed=seed, **how)
        code = command_line([*words, "--overwrite"])
        if code:  # a large group may leave a split, or a class of train, without an image
            assert code == 2
            return
        found = placed(folder / "a.h5")
        assert {number: int(label) for number, (_, label) in found.items()} == dict(
            enumerate(labels)
        )
        splits = {groups[number]: set() for number in found}
        for number, (split, _) in found.items():
            splits[groups[number]].add(split)
        assert {len(of) for of in splits.values()} == {1}
        held_out += [number for number, (split, _) in found.items() if split == "test"]
    assert not folds or sorted(held_out) == list(range(len(labels)))


def test_groups_leave_the_classes_even_and_folds_of_equal_size(images, tmp_path):
    rows = [(name(i), "abc"[i % 3], i // 2) for i in range(60)]
    manifest = table(tmp_path / "labels.csv", rows, "path,label,group")
    settings = {"manifest": manifest, "overwrite": True}
    for fold in range(1, 5):
        path = make_pack(images, tmp_path / "a.h5", fold=f"{fold}/4", **settings)
        assert all(3 <= count <= 7 for count in counts(path)["test"])
        assert facts(path)["provenance"]["fold"] == f"{fold}/4"
    rows = [(name(i), "ab"[i // 5 % 2], f"patient {i // 5}") for i in range(60)]
    table(manifest, rows, "path,label,group")
    path = make_pack(images, tmp_path / "a.h5", split="0.5,0.2,0.3", **settings)
    for split, share in zip(SPLITS, (15, 6, 9), strict=True):
        assert all(abs(count - share) <= 5 for count in counts(path)[split])


def test_a_fold_of_a_given_train_is_validation(tmp_path, refusal):
    root = class_folders(tmp_path / "images" / "training", {"a": 20, "b": 20}).parent
    class_folders(root / "testing", {"a": 3, "b": 4}, width=17)
    path = make_pack(root, tmp_path / "a.h5", size="13x11", fold="2/5")
    assert counts(path) == {"train": [16, 16], "validation": [4, 4], "test": [3, 4]}
    class_folders(root / "val", {"a": 3, "b": 4}, width=15)
    assert "--fold" in refusal(root, size="13x11", fold="2/5")


def test_a_fold_without_an_image_is_refused(images, tmp_path, refusal):
    rows = [(name(i), "ab"[i % 2], i // 2 % 4) for i in range(60)]
    manifest = table(tmp_path / "labels.csv", rows, "path,label,group")
    assert "--fold 5/5" in refusal(images, manifest=manifest, fold="5/5")


def test_images_that_a_manifest_names_and_the_source_lacks(images, tmp_path, refusal):
    rows = [(name(i), "ab"[i % 2]) for i in range(50)]
    manifest = table(tmp_path / "labels.csv", [*rows, ("x/none.png", "a")])
    assert "1 of 51 files" in refusal(images, manifest=manifest)
    path = make_pack(images, tmp_path / "a.h5", manifest=manifest, skip_bad=True)
    assert facts(path)["provenance"]["skipped"] == {"files": 1, "names": ["x/none.png"]}
    archive = zipped(tmp_path / "a.zip", images)
    assert "x/none.png" in refusal(archive, manifest=manifest)


# Shares: drawn alike for packs and for the HDF5 files of other programs, which are tested here


def shares_of(total):
    """Shares of train, validation and test, in hundredths."""
    return st.tuples(st.integers(1, total - 1), st.integers(0, total - 1)).filter(
        lambda cut: sum(cut) < total
    )


def largest_remainder(count, shares):
    exact = [count * share for share in shares]
    parts = [int(part) for part in exact]
    order = sorted(range(len(parts)), key=lambda i: (parts[i] - exact[i], i))
    for i in order[: count - sum(parts)]:
        parts[i] += 1
    return parts


@given(
    class_sizes=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    cut=shares_of(100),
    seed=st.integers(0, 10**6),
)
def test_every_class_is_divided_exactly_by_the_shares(tmp_path_factory, class_sizes, cut, seed):
    train, validation = cut
    hundredths = train, validation, 100 - train - validation
    shares = [Fraction(part, 100) for part in hundredths]
    text = ",".join(f"{part / 100:g}" for part in hundredths)
    path = tmp_path_factory.mktemp("shares") / "a.h5"
    labels = np.random.default_rng(seed).permutation(
        np.repeat(np.arange(len(class_sizes)), class_sizes)
    )
    with h5py.File(path, "w") as file:
        file["x"], file["y"] = np.arange(len(labels), dtype="f8").reshape(-1, 1, 1, 1), labels
    expected = np.array([largest_remainder(count, shares) for count in class_sizes])
    possible = expected[:, 0].all() and all(expected.sum(0)[[s > 0 for s in shares]])
    try:
        found = read_external(path, ExternalOptions("x", "y", None, text, seed, 0, 1e9))
    except hp.UsageError:
        assert not possible
        return
    assert possible
    rows = []
    for position, split in enumerate(SPLITS):
        if split not in found.splits:
            assert not expected[:, position].any()
            continue
        with hp.Split(found, split) as samples:
            sizes = np.bincount(samples.targets, minlength=len(class_sizes))
            out = np.empty((len(samples), 1, 1, 1), samples.dtype)
            which = samples.gather(np.arange(len(samples)), out).ravel().astype(int)
        assert sizes.tolist() == expected[:, position].tolist()
        assert np.array_equal(samples.targets, labels[which])
        rows += which.tolist()
    assert sorted(rows) == list(range(len(labels)))
