"""What a rank that fails alone leaves for those who look afterwards."""

from __future__ import annotations

from types import SimpleNamespace

from hpctrain.errors import RunError
from hpctrain.parallel import mpi


def test_the_heartbeat_of_a_rank_that_fails_holds_the_error_itself(monkeypatch, capsys):
    """Of a traceback its last line; the first one says nothing."""
    left: list[str] = []
    alone = SimpleNamespace(rank=0, size=1)
    monkeypatch.setattr(mpi, "current", lambda: SimpleNamespace(fail=left.append))
    monkeypatch.setattr(mpi, "MPI", SimpleNamespace(COMM_WORLD=alone))
    monkeypatch.setattr(mpi, "launched_rank", lambda: 0)

    def fail_with(error):
        try:
            raise error
        except BaseException as caught:
            return mpi.conclude(caught)

    assert fail_with(ValueError("no such layer")) == 1
    assert left == ["ValueError: no such layer"]
    printed = capsys.readouterr().err
    assert all(line.startswith("[rank 0 of 1 @") for line in printed.splitlines())
    assert "Traceback" in printed
    assert fail_with(KeyboardInterrupt()) == 1 and left[1:] == ["interrupted"]
    assert fail_with(RunError("disk full")) == 1 and left[2:] == []  # all know: it is agreed
    assert capsys.readouterr().err.endswith("hpctrain: disk full\n")
