"""Weight files: what goes in comes out, and every file that does not fit is refused."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch
from torch import nn

import hpctrain as hp
from tests.support.api import load_weights, read_model, save_model
from tests.support.spoil import flip_each_bit

METADATA = {"model": "net", "classes": ["a", "ü"], "image_shape": [5, 5, 1], "mean": 0.25}


def net(classes=7):
    return nn.Sequential(
        nn.Conv2d(3, 11, 3),
        nn.BatchNorm2d(11),
        nn.Flatten(),
        nn.Linear(11, 2),
        nn.Linear(2, classes),
    )


def flattened(model):
    """Make the parameters views of one vector, convolutions in memory as NHWC; the vector."""
    model.to(memory_format=torch.channels_last)
    flat = torch.cat([p.detach().as_strided((p.numel(),), (1,)) for p in model.parameters()])
    start = 0
    for p in model.parameters():
        p.data = flat[start : start + p.numel()].as_strided(p.shape, p.stride(), start)
        start += p.numel()
    return flat


def bits(tensor):
    """The bytes of a tensor of any type."""
    whole = tensor.resolve_conj().resolve_neg().contiguous()
    return whole.view(-1).view(torch.uint8)


def same(first, second):
    a, b = first.state_dict(), second.state_dict()
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


def test_views_of_a_flat_vector_are_saved_and_filled_in_place(tmp_path):
    source, model = net(), net()
    flat = flattened(model)
    source_flat = flattened(source)
    save_model(tmp_path / "m", source, {})
    assert [*tmp_path.iterdir()] == [tmp_path / "m"]
    assert (tmp_path / "m").stat().st_size < 4 * flat.numel() + 3000, "each view once"
    assert not torch.equal(flat, source_flat)
    load_weights(model, read_model(tmp_path / "m")[0], "m")
    assert same(source, model) and torch.equal(flat, source_flat)


def test_equal_weights_are_equal_files(tmp_path):
    model, path, contents = net(), tmp_path / "m", []
    for keys in ("abcdefgh", "hgfedcba", "bcadfegh", "abcdefgx"):
        save_model(path, model, {key: 1 for key in keys})
        contents.append(path.read_bytes())
    assert contents[0] == contents[1] == contents[2] != contents[3]


def test_files_of_other_programs_are_read_without_metadata(tmp_path):
    path = tmp_path / "other.safetensors"
    safetensors.torch.save_file({"w": torch.ones(3)}, path, {"format": "pt"})
    tensors, metadata = read_model(path)
    assert list(tensors) == ["w"] and metadata == {}
    with pytest.raises(hp.UsageError, match="holds weights but not the network they belong to"):
        hp.load(path)


def test_tensors_of_all_kinds_survive_the_file(tmp_path):
    path, source = tmp_path / "m", hp.build("tests.support.nets:FineTuned", (28, 28, 1), 10)
    save_model(path, source, METADATA)
    tensors, metadata = read_model(path)
    assert metadata == METADATA
    assert tensors.keys() == source.state_dict().keys()
    model = hp.build("tests.support.nets:FineTuned", (28, 28, 1), 10)
    assert not same(source, model)
    strides = {name: value.stride() for name, value in model.state_dict().items()}
    load_weights(model, tensors, path)
    for name, value in source.state_dict().items():
        found = model.state_dict()[name]
        assert torch.equal(bits(found), bits(value)), name
        assert (found.dtype, found.stride()) == (value.dtype, strides[name]), name
    others = safetensors.torch.load_file(path)
    assert torch.equal(others["frozen.weight"], source.get_parameter("frozen.weight"))
    assert others["conjugate"].dtype == torch.complex64


def test_every_flipped_bit_is_refused_or_has_no_effect(tmp_path):
    path, model = tmp_path / "m", nn.Linear(3, 2)
    save_model(path, model, METADATA)
    refused = 0
    for place in flip_each_bit(path):
        try:
            tensors, metadata = read_model(path)
        except hp.UsageError as error:
            refused += 1
            assert "\n" not in str(error)
            continue
        assert metadata == METADATA, place
        assert tensors.keys() == model.state_dict().keys(), place
        assert all(torch.equal(tensors[n], t) for n, t in model.state_dict().items()), place
    assert refused > 8 * (path.stat().st_size - 30), "all but those in the digest's name"


@pytest.mark.parametrize("change", ["value", "name", "type", "metadata"])
def test_altered_weights_are_refused(tmp_path, change):
    """Also where the file is a whole one, written by another program with the same metadata."""
    path, model = tmp_path / "m", net()
    save_model(path, model, METADATA)
    with safetensors.safe_open(path, "pt") as file:
        entries = file.metadata()
    tensors = read_model(path)[0]
    safetensors.torch.save_file(tensors, path, entries)
    assert read_model(path)[1] == METADATA, "its bytes are others, its content is not"
    if change == "value":
        tensors["4.weight"][0, 0] += 1
    elif change == "name":
        tensors["4.scale"] = tensors.pop("4.bias")
    elif change == "type":
        tensors["0.bias"] = tensors["0.bias"].view(torch.int32)
    else:
        entries["hpctrain"] = entries["hpctrain"].replace("0.25", "0.26")
    safetensors.torch.save_file(tensors, path, entries)
    with pytest.raises(hp.UsageError, match="tensors or metadata do not match their SHA-256"):
        read_model(path)
    del entries["hpctrain.sha256"]  # changed on purpose
    safetensors.torch.save_file(tensors, path, entries)
    assert read_model(path)[0].keys() == tensors.keys()


def test_masks_may_hold_infinity_and_weights_may_not(tmp_path):
    model = net()
    model.register_buffer("mask", torch.full((3,), -torch.inf))
    save_model(tmp_path / "m", model, {})
    load_weights(model, read_model(tmp_path / "m")[0], "m")
    model.get_parameter("4.bias").data[3] = torch.inf
    save_model(tmp_path / "m", model, {})
    model.get_parameter("4.bias").data[3] = 0
    with pytest.raises(hp.UsageError, match=r"4\.bias holds values that are not finite"):
        load_weights(model, read_model(tmp_path / "m")[0], "m")


@pytest.mark.parametrize("length", [0, 5, 8, 100, -1])
def test_a_file_cut_short_is_refused(tmp_path, length):
    path = tmp_path / "m.safetensors"
    save_model(path, net(), METADATA)
    read_model(path)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(hp.UsageError, match=r"or was cut short \([\d,]+ bytes\)"):
        read_model(path)


def test_foreign_and_missing_files_are_refused(tmp_path):
    torch.save(net().state_dict(), tmp_path / "m.pth")
    with pytest.raises(
        hp.UsageError, match=r"m\.pth is no safetensors .* of torch.save: .* --init .*m\.pth$"
    ):
        read_model(tmp_path / "m.pth")
    with pytest.raises(hp.UsageError, match=r"cannot read the weights .*absent: No such file"):
        read_model(tmp_path / "absent")
    with pytest.raises(hp.UsageError, match=r"cannot read the weights .*: Is a directory"):
        read_model(tmp_path)
