"""The long-lived ranks: what a test sees there, and what is told when one fails."""

import os

import pytest

from tests.support import ranks


@pytest.mark.ranks(1, 2, 3)
def test_the_world_is_as_large_as_the_test_is_for(comm):
    from hpctrain.launcher import launched_size
    from hpctrain.parallel.mpi import start_mpi

    world = start_mpi()
    assert comm.size == world.size == launched_size()
    assert world.allreduce(1) == comm.size
    world.Free()


@pytest.mark.ranks
def test_patches_and_variables_of_one_test_are_gone_in_the_next(comm, monkeypatch, capsys):
    assert os.environ.pop("LEFT_BEHIND", None) is None
    monkeypatch.setattr(os, "left_behind", 1, raising=False)
    os.environ["LEFT_BEHIND"] = "1"
    print("here")
    assert capsys.readouterr().out == "here\n"


@pytest.mark.ranks
def test_they_are_gone(comm):
    assert not hasattr(os, "left_behind") and "LEFT_BEHIND" not in os.environ


def fails_on_rank_1(comm):
    assert comm.rank == 0
    comm.Barrier()


def hangs(comm):
    if comm.rank == 1:
        comm.recv(source=0)


def test_a_failure_on_one_rank_is_shown_and_ends_the_job():
    with pytest.raises(ranks.RankError, match=r"rank 1\n(.*\n)*.*assert comm.rank == 0"):
        ranks.on_ranks(2, fails_on_rank_1)
    assert ranks.on_ranks(2, lambda comm: comm.rank) == [0, 1]


def test_a_rank_that_does_not_end_shows_its_stack():
    placed = {"comm": ranks.OnRank("comm")}
    with pytest.raises(ranks.RankError, match=r"rank 1 had not ended(.*\n)*.* in hangs"):
        ranks.job().call(2, hangs, placed, 1)


def test_a_command_runs_on_ranks():
    ended = ranks.command(2, "--version")
    assert (ended.code, ended.err) == (0, "") and ended.out.strip()
    assert ranks.command(3, "train", "--epochs", "x").code == 2
