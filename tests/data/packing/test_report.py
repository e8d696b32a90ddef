"""The bar of packing: the root's alone, its own images standing for all."""

from hpctrain.data.packing import report


def bar(capfd, monkeypatch, columns):
    monkeypatch.setenv("TERM", "xterm")
    with report.progress("decoding", 101, 17, columns) as advance:
        advance(16)
        advance(1)
    return capfd.readouterr().err


def test_the_root_shows_all_images(capfd, monkeypatch):
    assert "101/101" in bar(capfd, monkeypatch, 90)


def test_other_ranks_and_logs_show_nothing(capfd, monkeypatch):
    assert bar(capfd, monkeypatch, 0) == ""
