"""Networks by name and by the user's own function, and every way in which these are wrong."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import hpctrain as hp
from tests.support.api import check_forward
from tests.support.short import short_run

SHAPE = (13, 11, 3)
Write = Callable[[str], str]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write a module into the current folder, importable only from there; gives its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for name in ("own_network", "own_package", "own_package.net"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    def write(text: str) -> str:
        (tmp_path / "own_network.py").write_text("from torch import nn\n" + text)
        return "own_network"

    return write


def message(name: str, shape: tuple[int, int, int] = SHAPE, classes: int = 5) -> str:
    """The one line with which `name` is refused."""
    with pytest.raises(hp.UsageError) as caught:
        check_forward(hp.build(name, shape, classes), shape, (classes,))
    text = str(caught.value)
    assert "\n" not in text
    return text


GOOD = """
def net(image_shape, classes):
    height, width, channels = image_shape
    return nn.Sequential(nn.Flatten(), nn.Linear(height * width * channels, classes))
"""


def test_builds_by_name() -> None:
    model = hp.build("digits", (28, 28, 1), 10)
    check_forward(model, (28, 28, 1), (10,))


def test_weights_follow_torchs_generator() -> None:
    torch.manual_seed(1)
    first = hp.build("digits", (28, 28, 1), 10)
    torch.manual_seed(1)
    second = hp.build("digits", (28, 28, 1), 10)
    third = hp.build("digits", (28, 28, 1), 10)
    assert torch.equal(first.get_parameter("fc.weight"), second.get_parameter("fc.weight"))
    assert not torch.equal(first.get_parameter("fc.weight"), third.get_parameter("fc.weight"))


def test_builds_by_function_of_the_current_folder(module: Write) -> None:
    model = hp.build(f"{module(GOOD)}:net", SHAPE, 5)
    check_forward(model, SHAPE, (5,))
    assert isinstance(model, nn.Sequential)


def test_builds_by_function_in_a_package(module: Write, tmp_path: Path) -> None:
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "net.py").write_text("from torch import nn\n" + GOOD)
    check_forward(hp.build("own_package.net:net", SHAPE, 5), SHAPE, (5,))


def test_lazy_layers_get_their_shapes(module: Write) -> None:
    name = module("net = lambda image_shape, classes: nn.LazyConv2d(classes, 13, padding=(0, 1))")
    model = hp.build(f"{name}:net", (13, 11, 3), 5)
    with pytest.raises(hp.UsageError):
        check_forward(model, (13, 11, 3), (5,))
    assert model.get_parameter("weight").shape == (5, 3, 13, 13)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def net(shape): pass", "must be callable as function(image_shape=(H, W, C), classes=K)"),
        ("import absent_helper", "No module named 'absent_helper' (own_network.py, line 2)"),
        ("def net(:", "failed: SyntaxError: "),
        ("raise SystemExit(3)", "failed: SystemExit: 3 (own_network.py"),
        (
            "class Net(nn.Linear):\n    def get_extra_state(self): return {}\n"
            "net = lambda image_shape, classes: Net(1, 2)",
            "_extra_state is no dense tensor of a type that weight files can hold",
        ),
        (
            "import torch\ndef net(image_shape, classes):\n"
            "    model = nn.Linear(3, 5)\n"
            "    model.register_buffer('table', torch.eye(3).to_sparse())\n"
            "    return model",
            "net: table is no dense tensor of a type that weight files can hold",
        ),
    ],
)
def test_faults_of_the_users_function_are_one_line(module: Write, text: str, expected: str) -> None:
    assert expected in message(f"{module(text)}:net")


def test_the_cause_in_the_users_function_is_kept(module: Write) -> None:
    with pytest.raises(hp.UsageError) as caught:
        hp.build(f"{module('def net(image_shape, classes): return 1 / 0')}:net", SHAPE, 5)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_wrong_number_of_classes_is_refused_with_both(module: Write) -> None:
    name = module(GOOD.replace("channels, classes", "channels, 3"))
    text = message(f"{name}:net")
    assert "(2, 3)" in text and "5 classes" in text
    check_forward(hp.build(f"{name}:net", SHAPE, 5), SHAPE, (3,))


def test_wrong_image_shape_is_refused_with_the_cause(module: Write) -> None:
    model = hp.build(f"{module(GOOD)}:net", SHAPE, 5)
    with pytest.raises(hp.UsageError, match=r"images of 10x13x3 .* mat1 and mat2") as caught:
        check_forward(model, (13, 10, 3), (5,))
    assert "\n" not in str(caught.value)


def test_a_network_that_returns_no_tensor_is_refused(module: Write) -> None:
    name = module(
        "class Net(nn.LSTM):\n"
        "    def forward(self, x): return super().forward(x[:, 0])\n"
        "net = lambda image_shape, classes: Net(11, classes)"
    )
    assert "must return a tensor, not tuple, in evaluation mode" in message(f"{name}:net")


class Restless(nn.Module):
    """Draws random numbers in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.frozen = nn.BatchNorm2d(3).eval()
        self.fc = nn.Linear(3, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.norm(x)) + torch.rand(1)
        return self.fc(x.mean((2, 3)))


@pytest.mark.parametrize("shape", [SHAPE, (13, 11, 2)])
def test_check_forward_leaves_no_trace(shape: tuple[int, int, int]) -> None:
    model = Restless()
    before = copy.deepcopy(model.state_dict())
    generator = torch.get_rng_state()
    try:
        check_forward(model, shape, (5,))
        failed = False
    except hp.UsageError:
        failed = True
    assert failed == (shape != SHAPE)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert torch.equal(torch.get_rng_state(), generator)
    assert model.training and model.norm.training and not model.frozen.training
    assert all(p.grad is None for p in model.parameters())
    model(torch.rand(2, 3, 5, 5))  # negative control: a plain forward does leave traces
    assert model.norm.num_batches_tracked == 1
    assert not torch.equal(torch.get_rng_state(), generator)


@pytest.mark.ranks(1)
def test_a_network_s_own_train_is_called_before_and_after_an_evaluation(comm, tmp_path):
    """Layers may merge their weights for evaluation; one that is frozen stays as it is."""
    settings = short_run(tmp_path) | {"model": "tests.support.nets:OfMerging", "freeze": "frozen"}
    result = hp.train(**settings | {"validate_every": "3steps"})
    assert hp.evaluate(result.folder, trust_code=True).rows == 23
