"""Fixtures of the tests of data."""

from __future__ import annotations

import os

import pytest

from tests.support.api import command_line
from tests.support.pictures import command_words


@pytest.fixture
def refusal(tmp_path, capfd):
    """Pack what cannot be packed, which leaves nothing; returns the last line of stderr."""

    def refuse(source, output=tmp_path / "refused.h5", code=2, **settings):
        capfd.readouterr()
        before = sorted(os.listdir(output.parent))
        assert command_line(command_words(source, output, **settings)) == code
        assert sorted(os.listdir(output.parent)) == before
        return capfd.readouterr().err.rstrip("\n").split("\n")[-1]

    return refuse
