"""The long-lived ranks: what a test sees there, and what is told when one fails."""

import os
import re
import sys

import cloudpickle
import pytest

import hpctrain as hp
from tests.support import ranks
from tests.support.wait import wait_for


@pytest.mark.ranks(1, 2, 3)
def test_the_world_is_as_large_as_the_test_is_for(comm):
    from hpctrain.cluster import launched_size

    world = hp.start_mpi()
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


def test_a_failure_on_one_rank_and_where_others_wait_are_shown_and_the_next_call_works():
    with pytest.raises(ranks.RankError) as caught:
        ranks.on_ranks(2, fails_on_rank_1)
    told = str(caught.value)
    assert "--- rank 1\n" in told and "assert comm.rank == 0" in told
    assert re.search(r"--- rank 0 had not ended.*\n(.*\n)*.* in fails_on_rank_1", told)
    assert ranks.on_ranks(2, lambda comm: comm.rank) == [0, 1]


def test_ranks_end_with_the_process_that_started_them_whatever_they_do():
    job = ranks.Job(2)
    job.start()
    try:
        for connection in job.ranks:  # rank 1 then waits in MPI forever
            connection.send_bytes(cloudpickle.dumps((2, hangs, {"comm": ranks.OnRank("comm")})))
            connection.close()  # as the kernel does when that process dies
        wait_for(lambda: job.launch.poll() is not None)
        assert job.launch.members() == []
    finally:
        job.end()


class Unfinished:
    def __repr__(self):
        raise AttributeError("it has no name yet")


def test_an_error_beside_what_cannot_be_shown_is_described():
    unfinished = Unfinished()
    try:
        assert not unfinished, "the reason"
    except AssertionError as error:
        assert "AssertionError: the reason" in ranks.describe_error(error)


def test_ranks_that_cannot_start_fail_at_once(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ranks.RankError, match="not all ranks have started"):
        ranks.Job(2).ready()


def test_a_command_runs_on_ranks():
    ended = ranks.command(2, "--version")
    assert (ended.code, ended.err) == (0, "") and ended.out.strip()
    assert ranks.command(3, "train", "--epochs", "x").code == 2
