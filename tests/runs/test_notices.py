"""What ends a run from outside: notices, the clock, a request to stop, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import pytest

import hpctrain as hp
from tests.support import ranks
from tests.support.api import Control
from tests.support.launch import run
from tests.support.launches import launch, notes
from tests.support.short import records


def test_a_notice_is_heard_before_anything_is_imported():
    """The handler is there once hpctrain begins; numpy and torch come seconds later."""
    program = (
        "import runpy, sys, os, signal\n"
        "sys.argv = ['hpctrain', 'train', '--help']\n"
        "try: runpy.run_module('hpctrain', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "os.kill(os.getpid(), signal.SIGUSR2)\n"
        "print('heard', {'torch', 'numpy'} & set(sys.modules))\n"
    )
    assert run([sys.executable, "-c", program]).stdout.endswith("heard set()\n")
    assert run([sys.executable, "-c", program.replace("'train'", "'pack'")]).returncode < 0


def test_a_rank_that_is_done_ends_with_its_own_exit_code():
    """The first to end with 75 makes srun send SIGTERM to the others."""
    program = (
        "import os, runpy, signal, sys\n"
        "sys.argv = ['hpctrain', '--epochs', '0']\n"
        "try: runpy.run_module('hpctrain', run_name='__main__')\n"
        "except SystemExit as end: code = end.code\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "print('ended with', code, signal.getsignal(signal.SIGTERM).name)\n"
    )
    assert run([sys.executable, "-c", program]).stdout == "ended with 2 SIG_IGN\n"


def embedded(comm, settings):
    """Train in a program that embeds Python, whose handlers cannot be told, and restored."""
    set_handler, before = signal.signal, signal.getsignal(signal.SIGUSR1)

    def forget(number, handler):
        known = set_handler(number, handler)
        return None if number == signal.SIGUSR1 else known

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signal, "signal", forget)
        seen = hp.train(hp.Config(**settings), on_evaluation=lambda _: os.kill(os.getpid(), 10))
    set_handler(signal.SIGUSR1, before)
    return seen.status


def test_a_handler_of_a_program_that_embeds_python_is_no_error(settings):
    assert ranks.on_ranks(1, embedded, settings=settings) == ["preempted"]


ENDS = {  # what Slurm tells of the end of the job, in seconds from now, --time-limit -> leaves?
    "no limit": ({}, None, False),
    "long limit": ({}, "10m", False),
    "short limit": ({}, "5s", True),
    "job ends first": ({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": 4}, "10m", True),
    "limit ends first": ({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": 600}, "0:00:05", True),
    "job ends": ({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": 4}, None, True),
}


@pytest.mark.parametrize("case", ENDS)
def test_a_run_leaves_before_the_earlier_of_limit_and_end_of_the_job(settings, case):
    """Five seconds are kept for saving: then one step is done."""
    variables, limit, leaves = ENDS[case]

    def slurm(patch):
        for name in ("SLURM_JOB_ID", "SLURM_JOB_END_TIME"):
            patch.delenv(name, raising=False)
        for name, value in variables.items():
            now = int(time.time()) if name.endswith("TIME") else 0
            patch.setenv(name, str(now + int(value)))

    ended = launch(settings, 1, first=slurm, time_limit=limit)
    assert (ended.code, ended.step) == ((75, 1) if leaves else (0, 14))
    if leaves:
        assert "the time is up" in records(settings, "end")[-1]["reason"]


def test_an_end_that_slurm_does_not_tell_is_a_note_in_the_record(settings):
    """There is no squeue in a container, say."""

    def container(patch):
        patch.delenv("SLURM_JOB_END_TIME", raising=False)
        patch.setenv("SLURM_JOB_ID", "7")
        patch.setenv("PATH", "")

    assert launch(settings, 1, first=container, time_limit="10m").code == 0
    assert any("end of this job is unknown (squeue: No such file" in t for t in notes(settings))


def test_the_first_ctrl_c_after_a_stop_file_is_not_the_second(tmp_path):
    (tmp_path / "STOP").touch()
    with Control(tmp_path) as control:
        assert control.stop_requested()
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_run_leaves_with_time_for_a_step_an_evaluation_and_a_save(tmp_path):
    control = Control(tmp_path, time.time() + 60)
    assert control.preempted_by() is None
    control.slowest_step, control.slowest_evaluation, control.saving = 10.0, 5.0, 10.0
    assert control.preempted_by() is None  # 50 s
    control.slowest_evaluation = 20.0  # 65 s
    assert control.preempted_by() == "the time is up"
    assert control.preempted_by(evaluating=True) is None, "an evaluation looks at the clock itself"
    assert Control(None, time.time() + 1).preempted_by() is None  # rank 0 alone looks at the clock


def test_hpctrain_stop_asks_no_folder_that_is_no_run_and_no_run_that_is_done(tmp_path):
    folder = tmp_path / "runs/a"
    folder.mkdir(parents=True)
    refused = ranks.command(1, "stop", "a", cwd=tmp_path)
    assert refused.code == 2 and "no run or sweep 'a'" in refused.err
    (folder / "config.toml").touch()
    assert ranks.command(1, "stop", "a", cwd=tmp_path).code == 0
    assert (folder / "STOP").exists()
    (folder / "STOP").unlink()
    line = {"kind": "end", "time": "2026-01-01T00:00:00Z", "status": "done"}
    (folder / "progress.jsonl").write_text(json.dumps(line) + "\n")
    done = ranks.command(1, "stop", "runs/a", cwd=tmp_path)
    assert done.code == 0 and "already ended" in done.out
    assert not (folder / "STOP").exists()
    assert ranks.command(1, "stop", "b", cwd=tmp_path).code == 2
