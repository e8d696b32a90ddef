"""What ends a run from outside: notices, the clock, a STOP file, Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest

from hpctrain import launcher
from hpctrain.cli import main
from hpctrain.config import duration
from hpctrain.errors import UsageError
from hpctrain.launcher import UNDER_MPIRUN
from hpctrain.report.record import read_records
from hpctrain.training.control import Control, deadline
from tests.support.launch import run
from tests.support.packs import make_pack
from tests.training.runs import short_run


@pytest.fixture
def notices():
    launcher.catch_signals()
    yield
    launcher._received.clear()
    for number in launcher.notice_signals():
        signal.signal(number, signal.SIG_DFL)


def test_a_handler_of_a_program_that_embeds_python_is_no_error(monkeypatch):
    before = {number: signal.getsignal(number) for number in launcher.notice_signals()}
    with monkeypatch.context() as patched:
        patched.setattr(signal, "getsignal", lambda number: None)
        with launcher.signals_caught():
            os.kill(os.getpid(), signal.SIGUSR1)
            assert launcher.received_signal() == "SIGUSR1"
    assert launcher.received_signal() is None
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGUSR2"])
def test_a_notice_only_sets_a_flag(notices, name):
    control = Control(None)
    assert control.flags(0.5, False) == (0.5, False, False, False)
    os.kill(os.getpid(), getattr(signal, name))
    assert control.preempted_by() == name
    assert control.flags(0.5, True) == (0.5, False, True, True)


def test_sigterm_is_a_notice_unless_mpirun_sends_it(monkeypatch):
    for name in UNDER_MPIRUN:
        monkeypatch.delenv(name, raising=False)
    assert signal.SIGTERM in launcher.notice_signals()
    for name in UNDER_MPIRUN:
        with monkeypatch.context() as patch:
            patch.setenv(name, "2")
            assert signal.SIGTERM not in launcher.notice_signals()
            assert signal.SIGUSR2 in launcher.notice_signals()


def test_a_notice_is_heard_before_anything_is_imported():
    """The handler is there once hpctrain begins; numpy and torch come seconds later."""
    program = (
        "import runpy, sys, os, signal\n"
        "sys.argv = ['hpctrain', 'train', '--help']\n"
        "try: runpy.run_module('hpctrain', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "os.kill(os.getpid(), signal.SIGUSR2)\n"
        "from hpctrain.launcher import received_signal\n"
        "print('heard', received_signal(), {'torch', 'numpy'} & set(sys.modules))\n"
    )
    assert run([sys.executable, "-c", program]).stdout.endswith("heard SIGUSR2 set()\n")
    assert run([sys.executable, "-c", program.replace("'train'", "'pack'")]).returncode < 0


def test_a_rank_that_is_done_ends_with_its_own_exit_code():
    """The first to end with 75 makes srun send SIGTERM to the others."""
    program = (
        "import os, signal, sys\n"
        "from hpctrain.__main__ import program\n"
        "sys.argv = ['hpctrain', '--epochs', '0']\n"
        "code = program()\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "print('ended with', code, signal.getsignal(signal.SIGTERM).name)\n"
    )
    assert run([sys.executable, "-c", program]).stdout == "ended with 2 SIG_IGN\n"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("10m", 600), ("2h", 7200), ("5", 300), ("0.5m", 30), ("1:02:03", 3723)],
)
def test_durations(text, seconds):
    assert duration(text, "--time-limit") == seconds


@pytest.mark.parametrize("text", ["", "0", "-5", "soon", "1:2:3", "5d", "nan"])
def test_durations_that_are_none(text):
    with pytest.raises(UsageError, match="--time-limit .*: give a time, such as 30m"):
        duration(text, "--time-limit")


def test_the_deadline_is_the_earlier_of_limit_and_job(monkeypatch):
    for name in ("SLURM_JOB_END_TIME", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    now = time.time()
    assert deadline(None) == (None, None)
    assert deadline("10m") == (pytest.approx(now + 600, abs=5), None)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(now + 60)))
    assert deadline("10m") == (pytest.approx(now + 60, abs=2), None)
    assert deadline("30s") == (pytest.approx(now + 30, abs=5), None)


def test_an_end_that_slurm_does_not_tell_is_a_note_in_the_record(tmp_path, monkeypatch):
    """There is no squeue in a container, say."""
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    make_pack(tmp_path / "pack.h5", {"train": 20})
    config = short_run(tmp_path, "pack.h5", run="a", batch_size=10, time_limit="10m")
    monkeypatch.setenv("PATH", "")
    from hpctrain.parallel.mpi import start_mpi
    from hpctrain.training.train import train

    assert train(config, start_mpi()) == 0
    notes = [r["text"] for r in read_records(tmp_path / "runs/a") if r["kind"] == "note"]
    assert any("end of this job is unknown (squeue: No such file" in text for text in notes)


def test_a_run_leaves_with_time_for_a_step_an_evaluation_and_a_save(tmp_path):
    control = Control(tmp_path, time.time() + 60)
    assert control.preempted_by() is None
    control.slowest_step, control.slowest_evaluation, control.saving = 10.0, 5.0, 10.0
    assert control.margin() == 5 + 2 * 10 + 5 + 2 * 10
    assert control.preempted_by() is None
    control.slowest_evaluation = 20.0  # 65 s
    assert control.preempted_by() == "the time is up"
    assert control.preempted_by(evaluating=True) is None, "an evaluation looks at the clock itself"
    assert Control(None, time.time() + 1).preempted_by() is None  # rank 0 alone looks at the clock


def test_the_first_ctrl_c_after_a_stop_file_is_not_the_second(tmp_path):
    (tmp_path / "STOP").touch()
    with Control(tmp_path) as control:
        assert control.asked()
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)


def test_hpctrain_stop(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    assert main(["stop", "a"]) == 2, "this is no run"
    assert "it has no config.toml" in capsys.readouterr().err
    (folder / "config.toml").touch()
    assert main(["stop", "a"]) == 0
    with Control(folder) as control:
        assert control.asked()
    (folder / "STOP").unlink()
    (folder / "progress.jsonl").write_text('{"kind": "end", "status": "done"}\n')
    assert main(["stop", "runs/a"]) == 0
    assert "already ended" in capsys.readouterr().out
    assert not (folder / "STOP").exists()
    assert main(["stop", "b"]) == 2
    assert main(["stop"]) == 2
