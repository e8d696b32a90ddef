"""Initial weights from files of hpctrain, torch, torchvision, timm and Lightning."""

from __future__ import annotations

import argparse
import collections
import datetime
import os
import pathlib
import warnings

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import hpctrain as hp
from tests.models.test_weights import METADATA, net
from tests.support.api import load_init, load_weights, read_model, save_model
from tests.support.spoil import flip_each_bit

SHAPE = (32, 32, 3)


def saved(path, held):
    torch.save(held, path)
    return path


def prefixed(prefix, tensors):
    return {prefix + name: tensor for name, tensor in tensors.items()}


def refusal(model, path, classes=7):
    """The one line with which `path` is refused; nothing of `model` may change."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(hp.UsageError) as caught:
        load_init(model, path, classes, 3)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert "\n" not in str(caught.value)
    return str(caught.value)


def check_loaded(model, source, but):
    for name, value in model.state_dict().items():
        assert torch.equal(value, source[name]) == (name not in but), name


def test_a_classifier_for_other_classes_starts_fresh(tmp_path):
    path, source, model = tmp_path / "m", net(13), net(7)
    save_model(path, source, METADATA | {"mean": None})
    found = load_init(model, path, 7, 3)
    assert found.fresh == {"4.weight": 13, "4.bias": 13}
    check_loaded(model, source.state_dict(), ("4.weight", "4.bias"))
    said = f"--init {path}: 8 of 10 tensors loaded; the classifier starts fresh (13 classes"
    assert str(found) == f"{said} in the file): 4.weight, 4.bias"
    with pytest.raises(hp.UsageError, match=r"4\.weight is 13x2, the model's 7x2; 4\.bias is 13"):
        load_weights(model, read_model(path)[0], path)


@pytest.mark.parametrize(
    ("entry", "prefix"),
    [
        *[(None, ""), ("state_dict", "module."), ("model", "model."), ("own", "")],
        *[(None, "backbone."), ("own", "a.module.encoder_q.")],
    ],
)
def test_weights_are_found_in_files_of_torch(tmp_path, entry, prefix):
    source, model = hp.build("resnet18", SHAPE, 11), hp.build("resnet18", SHAPE, 5)
    tensors = {n: t for n, t in source.state_dict().items() if "num_batches" not in n}
    held = prefixed(prefix, tensors)
    if prefix:
        held["criterion.weight"] = torch.ones(11)
    if entry:
        state = torch.optim.AdamW(source.parameters()).state_dict()
        held = {"epoch": 3, "optimizer": state, entry: held, "args": argparse.Namespace(lr=0.1)}
    found = load_init(model, saved(tmp_path / "m.pth", held), 5, 3)
    assert (found.entry, found.prefix) == (entry or "", prefix)
    assert found.fresh == {"fc.weight": 11, "fc.bias": 11}
    assert found.left_out == (("criterion.weight",) if prefix else ())
    assert torch.equal(model.get_parameter("conv1.weight"), tensors["conv1.weight"])
    said = str(found)
    assert f"{entry} of " in said if entry else f"--init {tmp_path}" in said
    assert "100 of 102 tensors loaded" in said
    assert not prefix or f"names without '{prefix}'" in said
    assert not prefix or said.endswith("left out: criterion.weight")


def test_averaged_weights_are_preferred_and_said(tmp_path):
    source, averaged, model = net(), net(), net()
    own, better = source.state_dict(), {"n_averaged": torch.tensor(3)}
    better |= prefixed("module.", averaged.state_dict())
    found = load_init(model, saved(tmp_path / "m", {"model": own, "model_ema": better}), 7, 3)
    assert (found.entry, found.prefix, found.left_out) == ("model_ema", "module.", ("n_averaged",))
    check_loaded(model, averaged.state_dict(), ())


def test_a_file_without_classifier_or_with_another(tmp_path):
    source = dict(net().state_dict())
    del source["4.weight"], source["4.bias"]
    for extra in ({}, {"head.weight": torch.zeros(9, 2), "head.bias": torch.zeros(9)}):
        model = net()
        found = load_init(model, saved(tmp_path / "m", source | extra), 7, 3)
        assert found.fresh == {"4.weight": 0, "4.bias": 0} and found.left_out == tuple(extra)
        assert "classifier starts fresh (no classes in the file): 4.weight" in str(found)
        gone = dict.fromkeys(found.fresh, torch.empty(0))
        check_loaded(model, source | gone, tuple(gone))
    extra |= {"hidden.weight": torch.zeros(2, 2)}
    assert "head.weight 9x2 is not in the model" in refusal(
        net(), saved(tmp_path / "m", source | extra)
    )


@pytest.mark.parametrize(("theirs", "own"), [(3, 1), (3, 2), (3, 3), (3, 4), (3, 7), (1, 3)])
def test_a_first_convolution_is_adapted_to_other_channels(tmp_path, theirs, own):
    source, model = (hp.build("resnet18", (32, 32, n), 5) for n in (theirs, own))
    found = load_init(model, saved(tmp_path / "m", source.state_dict()), 5, own)
    assert found.adapted == ({} if own == theirs else {"conv1.weight": theirs})
    said = "adapted to the channels of the images: conv1.weight"
    assert (said in str(found)) == (own != theirs)
    before, weight = (net.get_parameter("conv1.weight") for net in (source, model))
    if 1 in (own, theirs):  # gray images have the same answers
        torch.testing.assert_close(weight.sum(1), before.sum(1))
    else:
        expected = torch.cat([before] * 3, 1)[:, :own] * theirs / own
        torch.testing.assert_close(weight, expected)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("1.running_mean", None, "does not fit the model: 1.running_mean 11 is not in the file"),
        ("extra.weight", torch.zeros(2, 3), "extra.weight 2x3 is not in the model"),
        ("3.weight", torch.zeros(3, 11), "3.weight is 3x11, the model's 2x11"),
        ("4.weight", torch.zeros(13, 3), "4.weight is 13x3, the model's 7x2"),
        ("0.weight", torch.zeros(12, 1, 3, 3), "0.weight is 12x1x3x3, the model's 11x3x3x3"),
        ("4.bias", torch.tensor(1.0), "4.bias is a number, the model's 7"),
        # torch would copy quantized weights without their scale, and real parts alone
        ("3.weight", torch.zeros(2, 11, dtype=torch.int8), "3.weight is torch.int8, the model's"),
        ("3.weight", torch.zeros(2, 11, dtype=torch.complex64), "is torch.complex64, the model's"),
    ],
)
def test_other_networks_are_refused_and_nothing_changes(tmp_path, name, value, expected):
    tensors = {**net().state_dict(), name: value}
    held = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    assert expected in refusal(net(), saved(tmp_path / "m", held))


def test_the_entry_with_most_tensors_is_taken_also_in_half_precision(tmp_path):
    half = {n: t.half() if t.is_floating_point() else t for n, t in net().state_dict().items()}
    held = {"criterion": {"weight": torch.ones(3, 3)}, "net": half}
    found = load_init(net(), saved(tmp_path / "m", held), 7, 3)
    assert (found.entry, found.fresh) == ("net", {})


def test_only_the_last_layer_may_differ_in_classes(tmp_path):
    tensors = dict(net(2).state_dict())
    tensors["3.weight"], tensors["3.bias"] = torch.zeros(5, 11), torch.zeros(5)
    safetensors.torch.save_file(tensors, tmp_path / "m")
    said = refusal(net(2), tmp_path / "m", 2)
    assert "3.weight is 5x11, the model's 2x11; 3.bias is 5" in said


def test_the_network_for_which_a_file_was_saved_is_named(tmp_path):
    save_model(tmp_path / "own", hp.build("resnet18", SHAPE, 7), METADATA | {"mean": None})
    assert "own (saved for --model net) does not fit the model" in refusal(net(), tmp_path / "own")


def test_values_of_training_scripts_beside_the_weights_are_read_or_left_out(tmp_path):
    source, model = net(), net()
    beside = {
        "epoch": np.int64(3),
        "best": [np.float64(0.5), np.float32(0.5), np.bool_(True), np.str_("top1")],
        "curve": np.arange(6.0).reshape(2, 3, order="F"),
        "random": np.random.RandomState(0).get_state(),
        "history": collections.defaultdict(list, {"loss": [1.0]}),
        "args": argparse.Namespace(lr=0.1, output=pathlib.Path("/x/y")),
        "windows": pathlib.PureWindowsPath("c:/x"),
        "time": datetime.datetime(2026, 1, 2, 3, tzinfo=datetime.UTC),
    }
    found = load_init(model, saved(tmp_path / "m", {"net": source.state_dict()} | beside), 7, 3)
    assert (found.entry, found.left_out) == ("net", ())
    check_loaded(model, source.state_dict(), ())


@pytest.mark.parametrize("order", "<>")
def test_arrays_of_numpy_are_weights(tmp_path, order):
    source, model = net(), net()
    arrays = {name: tensor.numpy() for name, tensor in source.state_dict().items()}
    arrays = {n: np.array(a, a.dtype.newbyteorder(order), order="F") for n, a in arrays.items()}
    load_init(model, saved(tmp_path / "m", arrays), 7, 3)
    check_loaded(model, source.state_dict(), ())


def test_arrays_of_objects_are_refused(tmp_path):
    held = {**net().state_dict(), "names": np.array([{}, None], object)}
    assert "dtype 'O8' holds no numbers" in refusal(net(), saved(tmp_path / "m", held))


@pytest.mark.parametrize("entry", ["state.model", "a.b.net", "discriminator"])
def test_weights_are_found_in_entries_of_entries(tmp_path, entry):
    """Of several those with the names of the network, whatever the others are called."""
    source, model, held = net(), net(), net().state_dict()
    held = source.state_dict()
    for name in reversed(entry.split(".")):
        held = {name: held}
    larger = hp.build("resnet18", SHAPE, 7).state_dict()
    held |= {"generator": larger, "ema": prefixed("a.", larger)}
    found = load_init(model, saved(tmp_path / "m", held), 7, 3)
    assert found.entry == entry and f"--init {entry} of " in str(found)
    check_loaded(model, source.state_dict(), ())


@pytest.mark.parametrize(
    ("of_file", "own"),
    [
        ("0._orig_mod.", "0."),
        ("module.0.module._orig_mod.", "0."),
        ("model._orig_mod.0.", "0."),
        ("0.", "0._orig_mod."),
    ],
)
def test_wrappers_inside_names_are_removed(tmp_path, of_file, own):
    source, model = net(), net()
    if "_orig_mod" in own:
        model[0] = nn.Sequential(collections.OrderedDict(_orig_mod=model[0]))
    outer = of_file.partition("0.")[0]
    renamed = {
        n.replace("0.", of_file, 1) if n.startswith("0.") else outer + n: tensor
        for n, tensor in source.state_dict().items()
    }
    found = load_init(model, saved(tmp_path / "m", renamed), 7, 3)
    assert torch.equal(next(model.parameters()), next(source.parameters()))
    assert found.fresh == {} and found.left_out == ()
    assert ("_orig_mod." in found.prefix) == ("_orig_mod" in of_file)


def test_a_program_of_torchscript_is_refused_by_name(tmp_path):
    with warnings.catch_warnings(action="ignore"):
        torch.jit.script(net()).save(tmp_path / "m")
    assert "m is a program of TorchScript: save its .state_dict()" in refusal(net(), tmp_path / "m")


class Executing:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("zipped", [True, False])
def test_no_code_of_a_file_is_executed(tmp_path, zipped):
    path, made = tmp_path / "m.pth", tmp_path / "made"
    held = {"state_dict": net().state_dict(), "more": Executing(made)}
    torch.save(held, path, _use_new_zipfile_serialization=zipped)
    assert "holds an object of the type posix.mkdir, and no code of a file" in refusal(net(), path)
    torch.save(net(), path, _use_new_zipfile_serialization=zipped)
    assert "object of the type torch.nn.modules.container.Sequential" in refusal(net(), path)
    assert not made.exists()
    del held["more"]
    torch.save(held, path, _use_new_zipfile_serialization=zipped)
    assert load_init(net(), path, 7, 3).entry == "state_dict"


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ([1, 2], "but list of 2"),
        (torch.ones(2, 2), "but Tensor"),
        ({}, "but dict with nothing"),
        ({"lr": 0.1}, "but dict with lr"),
        ({"model": {"a": 1}}, "but dict with model"),
    ],
)
def test_files_without_weights_are_refused(tmp_path, held, said):
    text = refusal(net(), saved(tmp_path / "m", held))
    assert "m holds no weights" in text and text.endswith(said)


def test_damaged_files_are_refused(tmp_path):
    source, model = nn.Linear(3, 2), nn.Linear(3, 2)
    path = saved(tmp_path / "m", source.state_dict())
    whole = path.read_bytes()
    for length in range(5, len(whole), 97):
        path.write_bytes(whole[:length])
        refusal(model, path)
    path.write_bytes(whole)
    for _ in flip_each_bit(path, step=5):
        try:
            load_init(model, path, 2, 3)
        except hp.UsageError as error:
            assert "\n" not in str(error)
        else:
            check_loaded(model, source.state_dict(), ())


def test_statistics_of_the_training_are_given_on(tmp_path):
    path, mean, std = tmp_path / "m", [0.5, 0.25], [0.5, 0.5]
    save_model(path, net(), METADATA | {"mean": mean, "std": std})
    assert load_init(net(), path, 7, 3).normalization == (tuple(mean), tuple(std))
    save_model(path, net(), METADATA | {"mean": None, "std": None})
    assert load_init(net(), path, 7, 3).normalization == ()
    torch.save(net().state_dict(), path)
    assert load_init(net(), path, 7, 3).normalization is None
