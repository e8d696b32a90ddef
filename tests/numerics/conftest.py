import pytest

from tests.support.short import short_run


@pytest.fixture
def short(tmp_path):
    """Settings of a short run, as keywords."""
    return short_run(tmp_path)


@pytest.fixture
def fixed(short):
    """The same with 4 shards and bits that depend on nothing else."""
    return short | {"shards": 4, "deterministic": True}
