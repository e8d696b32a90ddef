"""Tests marked `gpu` need a GPU, real or emulated; those marked `emulated_gpu` the emulated one."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.emulator import EMULATED


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    how = "scripts/test --emulated-gpu emulates one"
    for item in items:
        if item.get_closest_marker("gpu") and torch.cuda.device_count() == 0:
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU; {how}"))
        if item.get_closest_marker("emulated_gpu") and not EMULATED:
            item.add_marker(pytest.mark.skip(reason=f"needs the emulated GPU; {how}"))
