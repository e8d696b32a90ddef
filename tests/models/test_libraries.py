"""Networks of timm and torchvision, with stand-ins for both where they are not installed."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from hpctrain.config.imports import own_functions
from hpctrain.errors import UsageError
from hpctrain.models import build, check_forward, load_init, own_input
from hpctrain.models.libraries import library_with

SHAPE = (16, 16, 3)
Shape = tuple[int, int, int]


def refusal(name: str, shape: Shape = SHAPE) -> str:
    """The one line with which a network is refused."""
    with pytest.raises(UsageError) as caught:
        check_forward(build(name, shape, 5), shape, (5,))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_a_library_that_is_absent_is_named_with_the_command(
    monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    said = f"--model {library}:resnet18 needs {library}: pip install 'hpctrain[{library}]'"
    assert refusal(f"{library}:resnet18") == said
    assert library_with("resnet101") == ""


def test_a_library_for_another_torch_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "timm.py").write_text("raise RuntimeError('operator nms does not\\nexist')")
    for name in [n for n in sys.modules if n.partition(".")[0] == "timm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    said = "--model timm:a: importing timm failed: RuntimeError: operator nms does not exist"
    assert refusal("timm:a") == said
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator nms')")
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    tensors = build("digits", (28, 28, 1), 5).state_dict()
    torch.save(tensors, tmp_path / "m")
    with pytest.raises(UsageError, match="does not fit the model: conv1"):  # why it was refused
        load_init(build("resnet18", SHAPE, 5), tmp_path / "m", 5, 3)
    monkeypatch.chdir(tmp_path)  # a module beside a file that names the library is not imported
    assert "timm.py is not the installed timm: move it away" in refusal("timm:a")


@pytest.mark.parametrize(
    ("name", "shape", "mean"),
    [
        ("timm:tiny_net", (16, 16, 3), 0.125),
        ("timm:tiny_net", (20, 28, 7), 0.125),
        ("timm:tiny_vit", (16, 16, 1), 0.5),
        ("timm:tiny_vit.clip", (24, 12, 3), 0.25),
        ("timm:tiny_fixed", (16, 16, 3), 0.125),
        ("timm:tiny_rigid", (16, 16, 3), 0.125),
        ("torchvision:net", (20, 24, 3), 0.5),
        ("torchvision:googlenet", (16, 16, 3), 0.5),
        ("torchvision:vit_4", (24, 24, 3), 0.5),
    ],
)
def test_networks_are_made_for_the_images(
    libraries: None, name: str, shape: Shape, mean: float
) -> None:
    model = build(name, shape, 5)
    check_forward(model, shape, (5,))
    assert own_input(model)["mean"][0] == mean
    assert tuple(own_input(model)["input_size"]) == (3, 16, 16)
    torch.manual_seed(0)
    first = build(name, shape, 5)
    torch.manual_seed(0)
    second = build(name, shape, 5)
    assert all(map(torch.equal, first.parameters(), second.parameters()))


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("timm:tiny_vot", SHAPE, "timm 0.0 has no such network; nearest: timm:tiny_vit"),
        ("timm:hf-hub:someone/x", SHAPE, "timm 0.0 has no such network"),
        ("timm:tiny_vit.dino", SHAPE, "--model timm:tiny_vit.dino: there are tiny_vit.clip"),
        ("timm:tiny_fixed", (20, 24, 3), "published for 16x16: pack with --size 16x16"),
        ("timm:tiny_rigid", (20, 24, 3), "published for 16x16: pack with --size 16x16"),
        ("timm:tiny_vit", (18, 16, 3), "of the patches; published for 16x16: pack with --size"),
        ("torchvision:nut", SHAPE, "torchvision 0.0 has no such network; nearest: torchvision:net"),
        ("torchvision:net", (16, 16, 1), "3 channels, and these have 1: pack with --channels 3"),
        ("torchvision:vit_4", (16, 20, 3), "square images, and these have 20x16 pixels; published"),
        ("torchvision:vit_4", (18, 18, 3), "patch size!; published for 16x16: pack with --size"),
        ("googlenet", SHAPE, "--model googlenet: no such network; there is torchvision:googlenet"),
        ("tiny_vit", SHAPE, "--model tiny_vit: no such network; there is timm:tiny_vit"),
    ],
)
def test_what_a_library_cannot_make_is_refused(
    libraries: None, name: str, shape: Shape, said: str
) -> None:
    assert said in refusal(name, shape)


def test_a_file_may_name_a_network_of_a_library_but_no_function() -> None:
    for name in ("timm:vit", "torchvision:net", "resnet18"):
        assert own_functions({"model": name}) == {}
    for name in ("timmy:vit", "torch.hub:load", "timm.models:load", "mine:net"):
        assert own_functions({"model": name, "loss": "timm:f"}) == {"model": name, "loss": "timm:f"}


def saved(path: Path, name: str, shape: Shape = SHAPE, **renamed: str) -> Path:
    """A file of the weights of a network for 1000 classes; `renamed` maps parts of names."""
    tensors = build(name, shape, 1000).state_dict()
    for old, new in renamed.items():
        tensors = {key.replace(old, new): value for key, value in tensors.items()}
    torch.save({"model": tensors}, path)
    return path


def test_weights_for_another_size_are_converted_by_the_library(
    libraries: None, tmp_path: Path
) -> None:
    for name, tensor in (("timm:tiny_vit", "pos_embed"), ("torchvision:vit_4", "encoder.pos_emb")):
        path = saved(tmp_path / "m", name)
        found = load_init(build(name, (24, 24, 3), 5), path, 5, 3)
        assert found.resized[0].startswith(tensor) and max(found.fresh.values()) == 1000
        assert f"; resized for images of this size: {tensor}" in str(found)
        assert load_init(build(name, SHAPE, 5), path, 5, 3).resized == ()


def test_classifier_and_channels_are_found_in_networks_of_timm(
    libraries: None, tmp_path: Path
) -> None:
    model, path = build("timm:tiny_net", (16, 16, 1), 5), saved(tmp_path / "m", "timm:tiny_net")
    found = load_init(model, path, 5, 1)
    assert found.fresh == {"head.weight": 1000, "head.bias": 1000}  # not the last layer
    assert found.adapted == {"stem.weight": 3}


def test_files_of_torchvision_have_auxiliaries_and_earlier_names(
    libraries: None, tmp_path: Path
) -> None:
    torchvision: ModuleType = importlib.import_module("torchvision")
    tensors = torchvision.models.get_model("googlenet").state_dict()
    torch.save(tensors, tmp_path / "m")
    found = load_init(build("torchvision:googlenet", SHAPE, 5), tmp_path / "m", 5, 3)
    assert found.left_out == ("aux1.weight", "aux1.bias")
    torch.save({re.sub("norm1", "norm.1", n): t for n, t in tensors.items()}, tmp_path / "m")
    model = build("torchvision:googlenet", SHAPE, 5)
    load_init(model, tmp_path / "m", 5, 3)
    name = "features.denselayer1.norm1.weight"
    assert torch.equal(model.get_parameter(name), tensors[name])


@pytest.mark.parametrize(
    ("held", "wanted", "said"),
    [
        ("timm:tiny_net_wide", "timm:tiny_net", "it holds a timm:tiny_net_wide: --model timm:"),
        ("torchvision:net_wide", "torchvision:net", "a torchvision:net_wide: --model torchvision:"),
        ("torchvision:net_wide", "resnet18", "it holds a torchvision:net_wide: --model torch"),
        ("resnet34", "torchvision:net", "it holds a resnet34: --model resnet34"),
    ],
)
def test_the_network_of_a_library_that_a_file_holds_is_named(
    libraries: None, tmp_path: Path, held: str, wanted: str, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        load_init(build(wanted, SHAPE, 5), saved(tmp_path / "m", held), 5, 3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["timm:vit_tiny_patch16_224", "timm:resnet18"])
def test_timm_itself(tmp_path: Path, name: str) -> None:
    timm = pytest.importorskip("timm")
    source = timm.create_model(name.partition(":")[2])
    torch.save({"state_dict_ema": source.state_dict()}, tmp_path / "m")
    model = build(name, (64, 64, 1), 5)
    check_forward(model, (64, 64, 1), (5,))
    found = load_init(model, tmp_path / "m", 5, 1)
    assert max(found.fresh.values()) == 1000 and len(found.adapted) == 1
    assert found.resized == (("pos_embed",) if "vit" in name else ())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["vit_b_16", "densenet121", "inception_v3", "resnet18"])
def test_torchvision_itself(tmp_path: Path, name: str) -> None:
    models = pytest.importorskip("torchvision").models
    tensors = models.get_model(name).state_dict()
    earlier = r"(denselayer\d+\.(?:norm|conv))([12])\."
    torch.save({re.sub(earlier, r"\1.\2.", n): t for n, t in tensors.items()}, tmp_path / "m")
    model = build(f"torchvision:{name}", (96, 96, 3), 5)
    found = load_init(model, tmp_path / "m", 5, 3)
    assert max(found.fresh.values()) == 1000
    assert bool(found.resized) == (name == "vit_b_16")
    assert bool(found.left_out) == (name == "inception_v3")
    if name == "resnet18":
        assert load_init(build(name, (96, 96, 3), 5), tmp_path / "m", 5, 3).prefix == ""
