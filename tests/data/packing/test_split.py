from fractions import Fraction

import numpy as np
import pytest

from hpctrain.config import split_shares
from hpctrain.data.packing.split import (
    LEFT_OUT,
    TEST,
    TRAIN,
    VALIDATION,
    assign,
    cut,
    equal_pixels,
    rows_by_split,
)
from hpctrain.errors import UsageError

KNOWN = [176, 1, 107, 23, 55, 144, 52, 73, 24, 70, 191, 111, 165, 161, 156, 87, 82, 174, 145, 76]
THREE = split_shares("0.8,0.1,0.1")
TWO = split_shares("0.9,0.1")


def assigned(labels, groups=None, given=None, shares=THREE, seed=0):
    labels = np.asarray(labels)
    groups = np.arange(len(labels)) if groups is None else np.asarray(groups)
    given = np.full(len(labels), LEFT_OUT, np.int8) if given is None else np.asarray(given, np.int8)
    return assign(labels, shares, seed, given, groups)


def counts(labels, splits):
    return [np.bincount(splits[labels == k] + 1, minlength=4)[1:].tolist() for k in set(labels)]


def test_shares_are_exact():
    assert split_shares("0.8, 0.1,0.1") == (Fraction(4, 5), Fraction(1, 10), Fraction(1, 10))
    assert split_shares("0.9,0.1") == (Fraction(9, 10), 0, Fraction(1, 10))
    assert split_shares("1/3,1/3,1/3")[1] == Fraction(1, 3)
    assert split_shares("1") == (1, 0, 0)
    for text in ("0.9", "0.9,0.2", "0,1", "1.2,-0.2", "a,b", "", "0.5,0.2,0.2,0.1", "1/0,1"):
        with pytest.raises(UsageError, match="give shares that sum to 1"):
            split_shares(text)


def test_largest_remainder():
    assert cut(101, THREE) == [81, 10, 10]
    assert cut(9, THREE) == [7, 1, 1]
    assert cut(5, (Fraction(1, 2), Fraction(0), Fraction(1, 2))) == [3, 0, 2]
    assert cut(898, TWO) == [808, 0, 90]
    for count in range(200):
        parts = cut(count, THREE)
        assert sum(parts) == count
        assert all(abs(parts[i] - count * THREE[i]) < 1 for i in range(3))


def test_every_class_is_cut_exactly():
    labels = np.repeat([0, 1, 2], [101, 7, 53])
    assert counts(labels, assigned(labels)) == [[81, 10, 10], cut(7, THREE), cut(53, THREE)]
    assert counts(labels, assigned(labels, shares=TWO)) == [
        cut(101, TWO),
        cut(7, TWO),
        cut(53, TWO),
    ]


def test_the_seed_decides():
    labels = np.repeat([0, 1], 101)
    assert (assigned(labels) == assigned(labels)).all()
    assert not (assigned(labels) == assigned(labels, seed=1)).all()


def test_equal_images_stay_together_and_counts_stay_exact():
    labels = np.repeat([0, 1], [101, 97])
    groups = np.arange(198)
    groups[[3, 50]] = 3  # twice in class 0
    groups[[10, 20, 30]] = 10
    groups[[5, 150]] = 5  # in both classes
    for seed in range(20):
        splits = assigned(labels, groups, seed=seed)
        for group in (3, 10, 5):
            assert len(set(splits[groups == group])) == 1
        assert counts(labels, splits) == [cut(101, THREE), cut(97, THREE)]
    alone = [assigned(labels, seed=seed) for seed in range(20)]
    assert any(splits[3] != splits[50] for splits in alone)  # without groups they are torn apart


def test_a_set_in_which_every_image_stands_twice():
    labels = np.repeat([0, 1], 100)
    groups = np.arange(200) // 2
    splits = assigned(labels, groups, shares=TWO)
    assert (splits[::2] == splits[1::2]).all()
    assert counts(labels, splits) == [[90, 0, 10], [90, 0, 10]]


def test_a_group_larger_than_any_split_still_places_everything():
    labels = np.zeros(23, int)
    splits = assigned(labels, np.where(np.arange(23) < 21, 0, np.arange(23)))
    assert len(set(splits[:21])) == 1 and (splits >= 0).all()


def test_a_given_test_split_is_kept_and_copies_of_it_leave_train():
    labels = np.tile([0, 1], 50)
    given = np.where(np.arange(100) < 80, TRAIN, TEST)
    groups = np.arange(100)
    groups[[2, 90]] = 2  # an image of train stands in test too
    splits = assigned(labels, groups, given, shares=TWO)
    assert splits[2] == LEFT_OUT and splits[90] == TEST
    others = np.delete(np.arange(100), 2)
    assert (splits[others] == given[others]).all()


def test_validation_is_drawn_out_of_a_given_train():
    labels = np.tile([0, 1], 45)
    given = np.where(np.arange(90) < 72, TRAIN, TEST)
    splits = assigned(labels, None, given)
    assert (splits[72:] == TEST).all()
    assert counts(labels[:72], splits[:72]) == [[32, 4, 0], [32, 4, 0]]  # 8 : 1
    given[:9] = VALIDATION
    assert (assigned(labels, None, given) == given).all()


def test_only_train_given_is_no_split():
    labels = np.zeros(100, int)
    assert (assigned(labels, None, np.zeros(100)) == assigned(labels)).all()


def test_rows_are_shuffled_and_all_there():
    labels = np.repeat([0, 1], [101, 97])
    splits = assigned(labels)
    rows = rows_by_split(splits, labels, ("a", "b"), ["train", "validation", "test"], 0)
    assert sorted(np.concatenate(list(rows.values())).tolist()) == list(range(198))
    assert rows["train"].tolist() != sorted(rows["train"])
    half = labels[rows["train"]][:79]  # contiguous partitions hold both classes
    assert 25 < half.sum() < 55
    assert rows["test"].tolist() == KNOWN, "the order of a pack is the same with every NumPy"
    again = rows_by_split(splits, labels, ("a", "b"), [], 1)
    assert again["train"].tolist() != rows["train"].tolist()


def test_empty_splits_and_untrained_classes_are_refused():
    labels = np.repeat([0, 1], 3)
    with pytest.raises(UsageError, match="no image for test: there are 6 images in 2 classes"):
        rows_by_split(assigned(labels, shares=TWO), labels, ("a", "b"), ["train", "test"], 0)
    shares = split_shares("0.1,0.9")
    labels = np.repeat([0, 1], [50, 2])
    with pytest.raises(UsageError, match="class 'b' has 2 images and none of them in train"):
        rows_by_split(assigned(labels, shares=shares), labels, ("a", "b"), ["train"], 0)


def test_equal_pixels():
    digests = np.array([b"x", b"y", b"x", b"z", b"y", b"x"])
    groups, equal = equal_pixels(digests)
    assert groups[0] == groups[2] == groups[5] != groups[1] == groups[4]
    assert [group.tolist() for group in equal] == [[0, 2, 5], [1, 4]]
    assert equal_pixels(np.array([b"x", b"y"]))[1] == []
