import pytest

from tests.support.short import short_run


@pytest.fixture
def settings(tmp_path):
    """Settings of a short run, as keywords."""
    return short_run(tmp_path)
