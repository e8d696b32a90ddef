"""The bar of packing: the root's alone, its own images standing for all."""

from types import SimpleNamespace

import pytest

from hpctrain.data.packing import report


def bar(capfd, monkeypatch, **team):
    monkeypatch.setenv("TERM", "xterm")
    with report.progress("decoding", 101, 17, SimpleNamespace(**team)) as advance:
        advance(16)
        advance(1)
    return capfd.readouterr().err


def test_the_root_shows_all_images(capfd, monkeypatch):
    assert "101/101" in bar(capfd, monkeypatch, rank=0, columns=90)


@pytest.mark.parametrize(("rank", "columns"), [(1, 90), (0, None)])
def test_other_ranks_and_logs_show_nothing(capfd, monkeypatch, rank, columns):
    assert bar(capfd, monkeypatch, rank=rank, columns=columns) == ""
