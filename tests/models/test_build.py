"""Networks by name and by the user's own function, and every way in which these are wrong."""

from __future__ import annotations

import sys

import pytest

import hpctrain as hp
from tests.support.api import check_forward
from tests.support.short import short_run

SHAPE = (13, 11, 3)


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module into the current folder, importable only from there; gives its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for name in ("own_network", "own_package", "own_package.net"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    def write(text):
        (tmp_path / "own_network.py").write_text("from torch import nn\n" + text)
        return "own_network"

    return write


def message(name, shape=SHAPE, classes=5):
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


def test_builds_by_function_of_the_current_folder_or_in_a_package(module, tmp_path):
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "net.py").write_text("from torch import nn\n" + GOOD)
    for name in (module(GOOD), "own_package.net"):
        check_forward(hp.build(f"{name}:net", SHAPE, 5), SHAPE, (5,))


def test_lazy_layers_get_their_shapes(module):
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
def test_faults_of_the_users_function_are_one_line(module, text, expected):
    assert expected in message(f"{module(text)}:net")


def test_the_cause_in_the_users_function_is_kept(module):
    with pytest.raises(hp.UsageError) as caught:
        hp.build(f"{module('def net(image_shape, classes): return 1 / 0')}:net", SHAPE, 5)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_wrong_number_of_classes_is_refused_with_both(module):
    name = module(GOOD.replace("channels, classes", "channels, 3"))
    text = message(f"{name}:net")
    assert "(2, 3)" in text and "5 classes" in text
    check_forward(hp.build(f"{name}:net", SHAPE, 5), SHAPE, (3,))


def test_wrong_image_shape_is_refused_with_the_cause(module):
    model = hp.build(f"{module(GOOD)}:net", SHAPE, 5)
    with pytest.raises(hp.UsageError, match=r"images of 10x13x3 .* mat1 and mat2") as caught:
        check_forward(model, (13, 10, 3), (5,))
    assert "\n" not in str(caught.value)


def test_a_network_that_returns_no_tensor_is_refused(module):
    name = module(
        "class Net(nn.LSTM):\n"
        "    def forward(self, x): return super().forward(x[:, 0])\n"
        "net = lambda image_shape, classes: Net(11, classes)"
    )
    assert "must return a tensor, not tuple, in evaluation mode" in message(f"{name}:net")


@pytest.mark.ranks(1)
def test_a_network_s_own_train_is_called_before_and_after_an_evaluation(comm, tmp_path):
    """Layers may merge their weights for evaluation; one that is frozen stays as it is."""
    settings = short_run(tmp_path) | {"model": "tests.support.nets:OfMerging", "freeze": "frozen"}
    result = hp.train(**settings | {"validate_every": "3steps"})
    assert hp.evaluate(result.folder, trust_code=True).rows == 23
