"""hpctrain supervise: launches that die, are preempted or fail; nodes that are lost.

Launches are those of a shell script in most of the tests, which the command line calls "hpctrain".
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time

import pytest

from tests.support.launch import Job, as_flags, mpirun
from tests.support.launches import check_same, launch, run_of
from tests.support.ranks import alone
from tests.support.records import beat, end_line, run_line
from tests.support.scripts import write_scripts
from tests.support.short import records, short_run
from tests.support.wait import wait_for

LEFT = 75


@pytest.fixture
def settings(tmp_path):
    """14 steps, with a checkpoint after every third."""
    same = {"deterministic": True, "shards": 4, "checkpoint_every": "3steps"}
    return short_run(tmp_path) | same


def supervise(settings, act, *words, **env):
    """Supervise a run on one rank of mpirun, and `act` on the supervisor after the first checkpoint
    of a launch; the exit code, and the supervisor's own lines. No process may be left.
    """
    program = [sys.executable, "-m", "hpctrain"]
    command = [*program, "supervise", *words, "--", mpirun(), "-n", "1", *program]
    job = Job([*command, *as_flags(settings)], env)
    try:
        if act:
            found = run_of(settings) / "checkpoints"
            before = set(found.glob("*"))
            wait_for(lambda: job.poll() is not None or set(found.glob("*.safetensors")) - before)
            assert job.poll() is None, job.communicate()
            os.kill(job.pid, act)
        _, err = job.communicate(timeout=200)
        wait_for(lambda: job.members() == [])
    finally:
        job.end()
    lines = re.findall("hpctrain supervise: .*", err)  # mpirun may leave a NUL before it
    return job.returncode, "\n".join(lines)


@pytest.mark.timeout(300)
def test_a_run_that_dies_is_launched_again_with_the_same_bits(settings):
    """Each launch is killed after nine steps: at least six are saved then, so the second ends."""
    fault = {"HPCTRAIN_FAULT": "step.done:kill:9"}
    code, lines = supervise(settings, None, "--max-failures", "1", **fault)
    assert code == 0, lines
    ((number, cause, step),) = re.findall(
        r"launch (\d) failed, exit code (?:137|9): (.*); restarting, after step (\d+)$", lines, re.M
    )
    assert number == "1" and step in ("6", "9")
    assert re.search("killed, reason unknown: rank 0 on ", cause)
    whole = settings | {"run": "whole"}
    assert launch(whole).code == 0
    check_same(settings, whole)


def test_a_killed_supervisor_leaves_nothing_and_one_with_a_notice_saves_and_requeues(
    settings, tmp_path
):
    endless = settings | {"epochs": 100000}
    assert supervise(endless, signal.SIGKILL) == (-signal.SIGKILL, "")
    path = write_scripts(tmp_path / "bin", scontrol=f'echo "$@" >>{tmp_path}/requeued')
    code, lines = supervise(endless, signal.SIGUSR2, PATH=path, SLURM_JOB_ID="7")
    assert code == LEFT, lines
    assert records(settings, "end")[-1]["status"] == "preempted"
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"
    assert "job 7 is requeued" in lines


# Launches of a shell script


#: What each launch begins with: its number is $n; what it calls works in the folder of the run.
PRELUDE = """
cd "${0%/*}/a"; echo "$*" >>launches; n=$(wc -l <launches)
save() { mkdir -p checkpoints; touch checkpoints/0000000$1.safetensors; }
record() { cat ../begun ../$1 >>progress.jsonl; }
once() { [ $n = 1 ] || exit 0; }
"""
ENDS = {  # files with the end of a launch, that `record` adds
    "preempted": end_line("preempted", "the time is up"),
    "failed": end_line("failed", "the disk is full"),
    "repeats": end_line("failed", "not finite", repeats=True),
    "killed": b"",
}


@pytest.fixture
def run(tmp_path):
    """The folder of a run, with a checkpoint of step 3."""
    (tmp_path / "a/checkpoints").mkdir(parents=True)
    (tmp_path / "a/checkpoints/00000003.safetensors").touch()
    (tmp_path / "begun").write_bytes(run_line(time=1e9))  # by a clock that is behind
    for name, line in ENDS.items():
        (tmp_path / name).write_bytes(line)
    return tmp_path / "a"


def supervised(run, script, *flags, before=(), env=None, more=()):
    """Supervise a run whose launches are this script; the exit code, and what was said."""
    file = run.with_name("launch")
    file.write_text(PRELUDE + script)
    words = [*before, "sh", file, "hpctrain", "--run", run.name, "--runs-dir", run.parent, *more]
    ended = alone("supervise", *flags, "--", *words, env=env)
    return ended.code, ended.err.replace("hpctrain supervise: ", "")


def launches(run):
    """The words of each launch."""
    return (run / "launches").read_text().splitlines()


ASKED = "trap 'exit {}' USR1; kill -USR2 $PPID; while :; do sleep 0.05; done"
VERDICTS = {  # launches -> exit code, launches, what is said
    "done": ("exit 0", 0, 1, "$"),
    "no reason": (
        *("once; record killed; exit 137", 0, 2),
        "launch 1 failed, exit code 137: no rank recorded a reason.*; restarting, after step 3",
    ),
    "signal": ("once; kill -9 $$", 0, 2, "launch 1 failed, SIGKILL: "),
    "asked": (
        *("save 6; record killed; " + ASKED.format(137), LEFT, 1),
        "ended, exit code 137: .*; the newest checkpoint is of step 6; the same command",
    ),
    "left": ("save 6; record preempted; exit 75", LEFT, 1, "saved after step 6; the same command"),
    "left, by srun": ("save 6; record preempted; exit 143", LEFT, 1, "saved after step 6"),
    "nothing gained": ("record preempted; exit 1", 1, 1, "not restarted: the time is up"),
    "nothing gained, asked": (
        *("record preempted; " + ASKED.format(1), LEFT, 1),
        "saved after step 3",
    ),
    "failed": ("once; record failed; exit 1", 0, 2, "launch 1 failed, exit code 1: the disk"),
    "repeats": ("record repeats; exit 1", 1, 1, "not restarted: not finite"),
    "mistake": ("exit 2", 2, 1, "$"),
    "mistake in another launch": (
        *("case $n in 1) save 6; exit 3;; 2) exit 2;; *) exit 0;; esac", 0, 3),
        "launch 1 failed, exit code 3.*\nlaunch 2 failed, exit code 2",
    ),
    "first start": ("rm checkpoints/*; exit 1", 1, 1, "$"),
    "later start": ("once; exit 1", 0, 2, "launch 1 failed"),
    "gives up": (
        *("case $n in 1) save 6;; 3) save 9;; esac; exit 3", 1, 5),
        r"(?s).*; 2 in a row without a new checkpoint: giving up\n$",
    ),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_what_follows_a_launch(run, name):
    script, code, count, said = VERDICTS[name]
    ended = supervised(run, script, "--max-failures=2")
    assert (ended[0], len(launches(run))) == (code, count), ended[1]
    assert re.match(said, ended[1]), ended[1]


CAUSES = {  # failures and stacks that ranks left, by rank -> what is said of the launch
    "nothing": ({}, {}, "all ranks were killed, .*: rank 0 on far, last heartbeat: step 3; rank 1"),
    "reasons": ({1: "later", 2: "ValueError: x"}, {0: "File"}, "rank 2: ValueError: x"),
    "crash": ({}, {0: "File", 2: "Fatal Python error: Bus error\n"}, r"rank 2 crashed \(Bus error"),
    "one": ({}, {0: "File", 1: "File"}, "killed, .* unknown: rank 2 on far, last .*: step 3 "),
    "end": ({}, dict.fromkeys(range(3), "F"), r"ended from outside \(SIGTERM\), rank 0 was in: st"),
}


@pytest.mark.parametrize("name", CAUSES)
def test_what_ranks_left_tells_why_a_launch_ended(run, tmp_path, name):
    failed, stacks, cause = CAUSES[name]
    for rank in range(3):
        beat(tmp_path, rank=rank, time=99.0 - rank, failed=failed.get(rank, ""))
    for rank, text in stacks.items():
        (tmp_path / f"ranks/{rank}.stack").write_text(text)
    code, said = supervised(run, "once; cp -rp ../ranks .; exit 1")
    assert code == 0 and re.match(f"launch 1 failed, exit code 1: {cause}", said), said


@pytest.fixture
def oom_kills(tmp_path, monkeypatch):
    """The file with the kernel's count of this job on this node: 3 so far."""
    job, proc = tmp_path / "cgroups/job_7", tmp_path / "proc"
    job.mkdir(parents=True)
    (job / "memory.events").write_text("oom 1\noom_kill 3\noom_group_kill 0\n")
    (proc / "self").mkdir(parents=True)
    (proc / "self/cgroup").write_text("0::/job_7/step_batch/user\n")
    mount = f"30 20 0:26 / {job.parent} rw shared:9 - cgroup2 cgroup2 rw\n"
    (proc / "self/mountinfo").write_text(mount)
    (proc / "vmstat").write_text("oom_kill 8\n")
    monkeypatch.setattr("hpctrain.launch.PROC", proc)
    return job / "memory.events"


def test_memory_is_named_as_the_cause_only_where_the_kernel_counted_a_kill(run, oom_kills):
    script = f"once; echo oom_kill {{}} >{oom_kills}; kill -9 $$"
    said = supervised(run, script.format(5))[1]
    hint = f"; likely out of memory: OOM kills in the cgroup {oom_kills.parent}: 2; restarting"
    assert said.startswith("launch 1 failed, SIGKILL: ") and hint in said
    (run / "launches").unlink()
    assert "memory" not in supervised(run, script.format(5))[1]
    oom_kills.unlink()
    (run / "launches").unlink()
    vmstat = f"once; echo oom_kill 9 >{run.parent}/proc/vmstat; kill -9 $$"
    assert "likely out of memory: OOM kills on this machine: 1;" in supervised(run, vmstat)[1]


@pytest.mark.parametrize("state", ["OUT_OF_MEMORY", "FAILED"])
def test_the_state_of_the_last_step_in_slurms_accounting_is_read(run, tmp_path, oom_kills, state):
    listed = f"7|RUNNING\\n7.batch|RUNNING\\n7.0|OUT_OF_MEMORY\\n7.1|{state}\\n"
    env = in_job(tmp_path, "n1 n2", srun=SRUN) | {"SLURM_JOB_ID": "7"}
    write_scripts(tmp_path / "bin", sacct=f"printf '{listed}'")
    _, said = supervised(run, "", before=["srun"], env=env)
    hint = "; likely out of memory: Slurm's state of step 7.1 is OUT_OF_MEMORY; restarting"
    assert (hint in said) == (state == "OUT_OF_MEMORY") and "launch 1 failed, exit code 3" in said


@pytest.mark.parametrize("left", ["heartbeat", "end"])
def test_what_an_earlier_launch_left_is_not_taken_for_the_cause(run, left):
    """Its heartbeats, by a clock that is ahead, and its crash, which the next launch records."""
    (run / "progress.jsonl").write_bytes(run_line(time=2e9))
    if left == "heartbeat":
        beat(run, time=time.time() + 600, failed="hung")
        script = "once; exit 1"
    else:
        script = "once; cat ../failed >>progress.jsonl; exit 1"
    code, said = supervised(run, script)
    assert code == 0 and "launch 1 failed, exit code 1: no rank recorded a reason" in said, said


def test_it_waits_before_the_third_launch_in_a_row_without_a_new_checkpoint(run):
    code, _ = supervised(run, "touch $n; exit 3")
    first, second, third = ((run / f"{n}").stat().st_mtime for n in (1, 2, 3))
    assert code == 1 and first < second and third > second + 4.5


def test_the_time_limit_holds_over_launches(run):
    limited = "--time-limit", "60s", "--resume", "never"
    assert supervised(run, "once; sleep 1.1; exit 3", more=limited)[0] == 0
    first, second = launches(run)
    assert first.split()[-4:-1] == ["--resume", "never", "--time-limit"]
    assert second.split()[-4:-1] == ["--resume", "auto", "--time-limit"]
    assert int(second.split()[-1][:-1]) < int(first.split()[-1][:-1]) <= 60
    code, said = supervised(run, "sleep 1.1; exit 3", more=("--time-limit", "1s"))
    assert code == LEFT and "; the time is up; the same command" in said


def test_a_run_without_a_name_is_given_that_of_its_job_or_the_time(tmp_path):
    """A job that is requeued must find it. The word hpctrain in a path is not the program."""
    for env, name in (({"SLURM_JOB_ID": "7"}, "job-7"), ({}, r"\d{8}-\d{6}")):
        rest = ["--wdir", "/home/me/hpctrain", "python", "-m", "hpctrain", "--runs-dir"]
        words = ["sh", "-c", f'echo "$*" >{tmp_path}/words', *rest, tmp_path]
        assert alone("supervise", "--", *words, env=env).code == 0
        assert re.search(f"--run {name}$", (tmp_path / "words").read_text())


def test_the_first_launch_of_a_job_that_was_requeued_continues(run):
    job = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}
    assert supervised(run, "exit 0", env=job, more=("--resume", "never"))[0] == 0
    assert launches(run)[0].endswith("--resume never --resume auto")


def test_a_command_whose_file_names_a_function_needs_trust_code(run, tmp_path):
    (tmp_path / "net.toml").write_text('model = "killing:net"\n')
    given = ["--config", str(tmp_path / "net.toml")]
    code, said = supervised(run, "exit 0", more=given)
    assert code == 2 and re.search(r"net\.toml names killing:net: .* --trust-code", said)
    assert not (run / "launches").exists()
    assert supervised(run, "exit 0", more=[*given, "--trust-code"]) == (0, "")
    assert launches(run)[0].endswith("--trust-code")


# Signals, and launchers that do not end


def test_a_launcher_that_does_not_end_is_killed_after_the_second_request(run, monkeypatch):
    monkeypatch.setattr("hpctrain.launch.KILL_AFTER", 1.0)
    script = "trap '' USR1; trap 'echo x >>terms' TERM; kill -INT $PPID; sleep 2; kill -INT $PPID;"
    code, said = supervised(run, script + "while :; do sleep 0.05; done")
    assert code == LEFT and "ended, SIGKILL: " in said
    assert said.startswith("SIGINT: the run saves and ends; once more ends it at once\n")
    assert (run / "terms").read_text() == "x\n"  # mpirun ends in disorder at a second one


def test_a_signal_that_a_scheduler_sends_twice_and_one_after_a_notice_are_no_second_request(run):
    """The user ended the job: it is not requeued."""
    script = "trap '' USR1; trap 'echo x >>terms' TERM;"
    script += "kill -USR2 $PPID; sleep 1.2; kill -TERM $PPID; sleep 0.1; kill -TERM $PPID;"
    code, said = supervised(run, script + "sleep 0.5; exit 75", env={"SLURM_JOB_ID": "7"})
    assert code == LEFT and not (run / "terms").exists()
    assert "saved after step 3; the same command with --run a resumes" in said


def test_a_launcher_that_starts_no_ranks_is_ended(run, monkeypatch):
    """Such as an srun that waits for nodes."""
    monkeypatch.setattr("hpctrain.supervise.IMPORTS", 0.0)
    code, said = supervised(run, "once; exec sleep 60", more=("--hang-timeout", "1s"))
    assert code == 0
    assert said.startswith(
        "no rank of launch 1 has started in 1 s: ending it\nlaunch 1 failed, SIG"
    )


@pytest.mark.parametrize("what", ["heartbeat", "record"])
def test_a_launch_whose_ranks_have_begun_is_not_ended(run, tmp_path, monkeypatch, what):
    monkeypatch.setattr("hpctrain.supervise.IMPORTS", 0.0)
    beat(tmp_path)
    script = "cp -r ../ranks .;" if what == "heartbeat" else "record killed;"
    assert supervised(run, script + "sleep 4", more=("--hang-timeout", "3s")) == (0, "")


def test_a_signal_before_a_launch_is_not_lost(run, tmp_path):
    scripts = {"scontrol": "kill -USR2 $PPID; echo n1", "srun": f"touch {tmp_path}/launched"}
    path = write_scripts(tmp_path / "bin", **scripts)
    env = {"PATH": path, "SLURM_JOB_NODELIST": "n1"}
    code, said = supervised(run, "", before=["srun"], env=env)
    assert code == LEFT and not (tmp_path / "launched").exists()
    assert "SIGUSR2 while no launch was running; the same command" in said


HOLD = """
import fcntl, os, time
lock, parent = open("lock", "w"), os.getppid()
fcntl.lockf(lock, fcntl.LOCK_EX)
open("held", "w").close()
while os.getppid() == parent: time.sleep(0.01)
time.sleep(3)
open("released", "w").close()
"""


def test_the_next_launch_waits_for_the_lock_of_the_last_one(run, tmp_path):
    (tmp_path / "hold.py").write_text(HOLD)
    script = f"[ $n = 1 ] || exec test -e released; {sys.executable} ../hold.py &"
    code, said = supervised(run, script + " until [ -e held ]; do sleep 0.05; done; kill -9 $$")
    assert code == 0, said
    assert f"{run} is still locked: waiting 120 s at most" in said


# Nodes of a job of Slurm


#: A step on a node that is asked, which may be dead; else a launch, which fails at first.
SRUN = """
case "$*" in
*nodelist=n2\\ *|*nodelist=n4\\ *) exit 1;;
*nodelist=n6\\ *) exec sleep 60;;
*nodelist=*) exit 0;;
esac
echo "$*, GPUs ${SLURM_GPUS-none}" >>$CALLS
[ $(wc -l <$CALLS) -gt 1 ] || exit 3
"""
TWO, UNEVEN = {"SLURM_NTASKS_PER_NODE": "2"}, {"SLURM_TASKS_PER_NODE": "2(x2),1"}
NODES = {  # nodes, tasks, how many are used -> options of the launches, and what is said
    "spares": (
        *("n1 n2 n3 n4 n5", TWO, 4),
        "--nodes=4 --ntasks=8 --ntasks-per-node=2 X, GPUs none",
        "--nodes=3 --ntasks=6 --ntasks-per-node=2 --overlap --exclude=n2,n4 X, GPUs none",
        "restarting on 3 nodes, without n2, n4, after step 3",
    ),
    # A step that Slurm takes for alive holds the cores: without --overlap, srun would wait for it.
    "none is dead": ("n1 n3", TWO, None, "X, GPUs 10", "--overlap X, GPUs 10", "on 2 nodes, after"),
    "uneven": (
        *("n1 n2 n3", UNEVEN, None, "X, GPUs 10"),
        *("--nodes=2 --ntasks=3 --overlap --exclude=n2 X, GPUs none", "without n2"),
    ),
    "Slurm is mute": ("n2 n4", {}, None, "X, GPUs 10", "--overlap X, GPUs 10", "on 2 nodes, after"),
    "few": ("n1 n2 n4", {}, None, "X, GPUs 10", None, "left (1 node, without n2, n4)"),
    "half": (
        *("n1 n2", {}, None, "X, GPUs 10"),
        *("--nodes=1 --ntasks=1 --ntasks-per-node=1 --overlap --exclude=n2 X, GPUs none", "n2"),
    ),
    "no answer": (
        *("n1 n6", {}, None, "X, GPUs 10"),
        *("--nodes=1 --ntasks=1 --ntasks-per-node=1 --overlap --exclude=n6 X, GPUs none", "n6"),
    ),
}


def in_job(tmp_path, names, srun=SRUN, scontrol="echo $3 | tr ' ' '\\n'"):
    """The environment of a job on these nodes."""
    path = write_scripts(tmp_path / "bin", scontrol=scontrol, srun=srun)
    env = {"PATH": path, "CALLS": str(tmp_path / "calls")}
    return env | {"SLURM_JOB_NODELIST": names, "SLURM_GPUS": "10"}


@pytest.mark.parametrize("name", NODES)
def test_dead_nodes_are_excluded_and_spares_take_their_place(run, tmp_path, monkeypatch, name):
    monkeypatch.setattr("hpctrain.supervise.ANSWER_WITHIN", 3.0)
    names, tasks, wanted, first, second, said = NODES[name]
    flags = [f"--nodes={wanted}"] if wanted else []
    env = in_job(tmp_path, names) | tasks
    before = ["srun", "--mpi=pmix", "python"]
    ended = supervised(run, "", *flags, before=before, env=env)
    found = (tmp_path / "calls").read_text().splitlines()
    found = [re.sub("--mpi=pmix python .*,", "X,", line) for line in found]
    assert found == [first, second][: 1 + bool(second)], ended
    assert said in ended[1] and ended[0] == (0 if second else LEFT)


@pytest.mark.parametrize(
    ("words", "flags", "named"),
    [
        (["srun", "-n4"], [], "srun -n4: leave nodes and tasks"),
        (["srun", "--nodes=2"], [], "srun --nodes=2: leave"),
        (["srun", "--mpi", "pmix", "-x", "n3"], [], "srun -x: leave"),
        (["srun"], ["--nodes=3"], "--nodes 3: the job has 2 nodes"),
        (["env"], ["--nodes=1"], "--nodes 1: it is for srun in a Slurm job"),
        (["srun", "env", "-n"], [], None),  # of another command
        (["env"], [], None),
    ],
)
def test_the_size_of_the_job_is_left_to_the_allocation(run, tmp_path, words, flags, named):
    env = in_job(tmp_path, "n1 n2", srun="exit 0")
    code, said = supervised(run, "exit 0", *flags, before=words, env=env)
    assert (code, said) == (0, "") if named is None else code == 2 and named in said


def test_a_failing_scontrol_is_reported(run, tmp_path):
    env = in_job(tmp_path, "n[1-2]", "exit 0", "echo no contact >&2; exit 1")
    text = "lost nodes will not be excluded (scontrol: no contact)\n"
    assert supervised(run, "", before=["srun"], env=env) == (0, text)
    code, said = supervised(run, "", "--nodes=2", before=["srun"], env=env)
    assert code == 1 and "scontrol: no contact" in said
    assert supervised(run, "exit 0", before=["env"], env=env) == (0, ""), "it does not ask"


SLURM = {"SLURM_JOB_ID": "7"}
TASK = SLURM | {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}  # its last one, of this ID
PBS = {"PBS_JOBID": "5.head", "FLUX_URI": "local:///run/flux"}  # a Flux within a job of PBS
REFUSED = "echo not allowed >&2; exit 159"


@pytest.mark.parametrize(
    ("job", "command", "said"),
    [
        (SLURM, REFUSED, "job 7 ends, it cannot be requeued: scontrol: not allowed"),
        (TASK, '[ "$*" = "requeue 7_3" ]', "job 7_3 is requeued"),
        (TASK | {"SLURM_RESTART_COUNT": "20"}, "", "job 7_3 ends, it was requeued 20 times"),
        (PBS, '[ "$*" = 5.head ]', "job 5.head is requeued"),
        (PBS, REFUSED, "job 5.head ends, it cannot be requeued: qrerun: not allowed"),
        ({"FLUX_URI": "x"}, "", "the same command with --run a resumes"),  # it has no such command
        ({}, "", "the same command with --run a resumes"),
    ],
)
def test_a_run_that_has_left_requeues_its_job(run, tmp_path, job, command, said):
    path = write_scripts(tmp_path / "bin", qrerun=command, scontrol=command)
    ended = supervised(run, "exit 75", env={"PATH": path, **job})
    assert ended == (LEFT, f"saved after step 3; {said}\n")
