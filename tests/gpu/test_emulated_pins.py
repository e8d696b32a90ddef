"""As tests/contract/test_pins.py, on the emulated GPU. To write its parts into the table:

tests/gpu/emulator/run python -m pytest tests/gpu/test_emulated_pins.py --update
"""

from __future__ import annotations

import pytest

from tests.support.pins import compare, write_data

pytestmark = [pytest.mark.emulated_gpu, pytest.mark.timeout(300)]
CASES = ["class weights", "flips and shifts", "JPEG files, random parts"]
CASES += ["own loss, augmentation, metric", "average", "salt and pepper", "gaussian noise"]
CASES += ["16 bits, HDF5", "own augmentation, normalized", "16 bits, HDF5, normalized"]
CASES += ["several classes", "values"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("pins").resolve())


@pytest.mark.parametrize("case", CASES)
def test_what_a_run_leaves_is_that_of_the_table(case, folder, request):
    compare(case, folder, (1,), "cuda", request.config.getoption("update"))
