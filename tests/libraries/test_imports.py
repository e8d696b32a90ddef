"""The libraries of other parts can be imported by the tests and by what they start."""

import sys

import pytest

from tests.support.launch import run


@pytest.mark.parametrize(
    "name",
    ["kornia.augmentation", "segmentation_models_pytorch", "timm", "torchvision.transforms.v2"],
)
def test_a_library_is_imported_by_programs_that_tests_start(name):
    done = run([sys.executable, "-c", f"import {name}"])
    assert done.returncode == 0, done.stderr
