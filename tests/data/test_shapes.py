"""The generated shapes: bytes that never change, targets that agree with masks, a pack by task."""

import hashlib
import os

import h5py
import numpy as np
import pytest

from hpctrain.packing import shapes
from tests.support import ranks
from tests.support.api import command_line
from tests.support.pictures import arrays, facts, make_pack

# Of the first four samples of seed 0. Every operation is exact by IEEE 754: equal bytes came from
# numpy 1.26 and 2.4, with and without AVX.
SHA256 = {
    "images": "053e3ddb9185337cf9bc60ca1d3cc98f3898b9bee9a5f8250f6b0ee70cf34286",
    "masks": "57853cf7ad2668d684bb3fc92d44bad3f5f6bfaad5941dcca758cc28bd96ff10",
}
ROWS = 28
TASKS = {
    "classify": "shapes.h5",
    "multilabel": "shapes-multilabel.h5",
    "regress": "shapes-regress.h5",
}


def sha256(arrays):
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()


@pytest.fixture(scope="module")
def samples():
    """The first samples of seed 0."""
    return [shapes.draw_sample(0, number) for number in range(120)]


@pytest.fixture
def few(monkeypatch):
    """A set of few images, which takes 7 MB."""
    monkeypatch.setattr(shapes, "IMAGES", ROWS)


def test_the_bytes_of_the_shapes_never_change(samples):
    images = sha256([sample.image for sample in samples[:4]])
    masks = sha256([sample.mask for sample in samples[:4]])
    assert {"images": images, "masks": masks} == SHA256


def areas_of(mask, value):
    """The sizes of connected areas of this value: pixels beside or above each other."""
    left = {tuple(place) for place in np.argwhere(mask == value).tolist()}
    sizes = []
    while left:
        waiting = [left.pop()]
        size = 0
        while waiting:
            row, column = waiting.pop()
            size += 1
            beside = {(row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)}
            waiting += beside & left
            left -= beside
        sizes.append(size)
    return sizes


def test_each_task_has_a_pack_of_the_same_images_with_what_their_masks_show(few, samples, tmp_path):
    """Counts are those of connected areas, and the class is that of the largest."""
    learned = {}
    for task, name in TASKS.items():
        assert command_line(["pack", "shapes", "--cache-dir", str(tmp_path), "--task", task]) == 0
        parts = [arrays(tmp_path / name, split) for split in ("train", "validation", "test")]
        assert [len(targets) for _, targets in parts] == [20, 4, 4]
        images = np.concatenate([images for images, _ in parts])
        assert np.array_equal(images, [sample.image for sample in samples[:ROWS]])
        learned[task] = np.concatenate([targets for _, targets in parts])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(TASKS.values())
    sizes = [[areas_of(sample.mask, 1 + kind) for kind in range(3)] for sample in samples[:ROWS]]
    counts = [[len(areas) for areas in of_image] for of_image in sizes]
    assert learned["regress"].tolist() == counts
    assert np.array_equal(learned["multilabel"], np.array(counts) > 0)
    largest = [[max(areas, default=0) for areas in of_image] for of_image in sizes]
    assert np.array_equal(learned["classify"], np.argmax(largest, axis=1))
    assert facts(tmp_path / "shapes.h5")["classes"] == ["disc", "square", "triangle"]
    with h5py.File(tmp_path / "shapes-regress.h5") as file:
        kind = '{"kind": "values", "columns": ["discs", "squares", "triangles"]}'
        assert file.attrs["targets"].decode() == kind
    assert command_line(["pack", "--check", str(tmp_path / "shapes-regress.h5")]) == 0


def test_a_class_of_masks_is_rare_and_images_show_what_masks_say(samples):
    masks = np.array([sample.mask for sample in samples])
    shares = np.bincount(masks.ravel(), minlength=4) / masks.size
    assert shares[0] > 0.85 and 0.002 < shares[3] < shares[1] / 2
    assert 0.2 < np.mean((masks == 3).any(axis=(1, 2))) < 0.4
    for image, mask, _ in samples:
        assert image.dtype == np.float32 and image.min() >= 0 and image.max() <= 1
        assert image[mask > 0].mean() > image[mask == 0].mean() + 0.02
        assert np.std(image, axis=(0, 1)).min() > 0.05


def test_shares_and_seed_of_the_shapes(few, tmp_path):
    path = make_pack("shapes", tmp_path / "a.h5", split="0.5,0.5", task="regress")
    assert [len(arrays(path, name)[1]) for name in ("train", "test")] == [14, 14]
    other = make_pack("shapes", tmp_path / "b.h5", split="0.5,0.5", task="regress", seed=1)
    assert not np.array_equal(arrays(path)[1], arrays(other)[1])


def test_a_run_makes_the_pack_of_its_task(tmp_path, few):
    words = ["--cache-dir", str(tmp_path), "--runs-dir", str(tmp_path / "runs"), "--dry-run"]
    for task, model in {"regress": "resnet18", "denoise": "autoencoder"}.items():
        given = ["--data", "shapes", "--task", task, "--model", model, "--batch-size", "5"]
        assert command_line([*given, *words, "--progress", "none"]) == 0
    names = sorted(path.name for path in tmp_path.glob("*.h5"))
    assert names == ["shapes-regress.h5", "shapes.h5"]


def draw(comm, folder, main, patch):
    """Each rank on its own, in another order of the tasks."""
    os.environ.clear()  # of the launcher's variables
    words = ["pack", "shapes", "--cache-dir", folder, "--overwrite", "--task"]
    with patch.context() as patched:
        patched.setattr(shapes, "IMAGES", 7)
        return [main([*words, task]) for task in ("regress", "multilabel")[:: 1 - 2 * comm.rank]]


def test_processes_that_draw_the_shapes_at_once_leave_whole_packs(tmp_path):
    given = {"folder": str(tmp_path), "main": command_line, "patch": pytest.MonkeyPatch}
    assert ranks.on_ranks(2, draw, **given) == [[0, 0], [0, 0]]
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["shapes-multilabel.h5", "shapes-regress.h5"]
    for name in names:
        assert command_line(["pack", "--check", str(tmp_path / name)]) == 0
