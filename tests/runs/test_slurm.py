"""The batch scripts of slurm/, submitted to a real Slurm of four nodes (scripts/slurm_testbed).

Only with HPCTRAIN_TEST_SLURM=1, as root: nobody's machine gets a Slurm by running the tests.
"""

from __future__ import annotations

import contextlib
import csv
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.api import read_records
from tests.support.launch import ROOT, environment, marked, run
from tests.support.packs import make_pack

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.environ.get("HPCTRAIN_TEST_SLURM") != "1", reason="HPCTRAIN_TEST_SLURM is not 1"
    ),
    pytest.mark.timeout(400),
]
TRAIN = ["--data", "pack.h5", "--batch-size", "16", "--shards", "4", "--deterministic"]
TRAIN += ["--progress", "none", "--hang-timeout", "60s", "--checkpoint-every", "5steps"]
SLOW = [*TRAIN, "--model", "tests.support.nets:Slow", "--epochs", "30"]  # 210 steps


class Cluster:
    """The testbed's commands, in a folder that its nodes see."""

    def __init__(self, folder: Path, conf: str, testbed: Callable[..., None]) -> None:
        self.folder, self.testbed = folder, testbed
        self.mark = f"HPCTRAIN_TEST_JOB={folder}"
        own = {"SLURM_CONF": conf, "HPCTRAIN_VENV": sys.prefix, "HPCTRAIN_TEST_JOB": str(folder)}
        self.env = environment(own)

    def call(self, *command: str) -> str:
        """Run a command of Slurm; its output."""
        done = subprocess.run(
            command, env=self.env, cwd=self.folder, capture_output=True, text=True, timeout=30
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def submit(
        self, script: str, *words: str, flags: tuple[str, ...] = (), pace: float = 0.025
    ) -> str:
        """Submit one of the files in slurm/, with the seconds that the slow network takes for a
        shard; the job's number.
        """
        flags += (f"--export=ALL,HPCTRAIN_TEST_PACE={pace}",)
        return self.call("sbatch", "--parsable", *flags, str(ROOT / "slurm" / script), *words)

    def job(self, number: str) -> dict[str, str]:
        """What Slurm says of a job."""
        return dict(re.findall(r"(\w+)=(\S*)", self.call("scontrol", "show", "job", number)))

    def wait(self, number: str, *states: str, seconds: float = 120) -> dict[str, str]:
        """The job, once it is in one of these states. One that was requeued does not wait the two
        minutes that Slurm gives it, only until the processes of its first life are gone.
        """
        until = time.monotonic() + seconds
        while (job := self.job(number))["JobState"] not in states:
            assert time.monotonic() < until, f"{job['JobState']}\n{self.log(number)}"
            if job["JobState"] == "PENDING" and job.get("Reason") == "BeginTime":
                time.sleep(5)
                with contextlib.suppress(AssertionError):  # it may have begun meanwhile
                    self.call("scontrol", "update", f"JobId={number}", "StartTime=now")
            time.sleep(0.5)
        return job

    def log(self, number: str) -> str:
        """What the job printed so far."""
        files = list(self.folder.glob(f"hpctrain*{number}*.log"))
        return "\n".join(file.read_text() for file in files)

    def steps(self, name: str) -> int:
        """Steps done by a run, as its record tells."""
        if not (self.folder / "runs" / name / "progress.jsonl").exists():
            return 0
        records = read_records(self.folder / "runs" / name)
        return max((r["step"] for r in records if r["kind"] == "step"), default=0)

    def wait_for_step(self, name: str, step: int, seconds: float = 60) -> None:
        until = time.monotonic() + seconds
        while self.steps(name) < step:
            assert time.monotonic() < until, f"no step {step} of {name}"
            time.sleep(0.2)

    def end(self, name: str) -> dict:
        return list(read_records(self.folder / "runs" / name))[-1]

    def ranks(self) -> list[int]:
        """Process ids of the ranks that are alive."""
        found = []
        for pid in marked(self.mark):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                found += [pid] if words[:3][1:] == [b"-m", b"hpctrain"] else []
        return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slurm")
    make_pack(folder / "pack.h5", {"train": 101, "validation": 13, "test": 23})
    home = Path("/var/lib") / f"hpctrain-testbed-{os.getpid()}"
    keep = [str(folder), sys.prefix, str(Path(sys.executable).resolve().parents[1])]
    env = environment({"HPCTRAIN_TESTBED": str(home), "HPCTRAIN_TESTBED_KEEP": ":".join(keep)})
    testbed = str(ROOT / "scripts" / "slurm_testbed")
    done = subprocess.run([testbed, "up"], env=env, capture_output=True, text=True, timeout=300)

    def control(*words):
        subprocess.run([testbed, *words], env=env, check=True, timeout=60)

    try:
        assert done.returncode == 0, f"Slurm was asked for and is not there:\n{done.stderr}"
        yield Cluster(folder, re.search(r"SLURM_CONF=(\S+)", done.stdout)[1], control)
    finally:
        subprocess.run([testbed, "down"], env=env, capture_output=True, timeout=60)
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(scope="module")
def whole(cluster):
    """The digest of the slow run without interruption, on one rank without Slurm."""
    words = [*SLOW, "--run", "whole"]
    done = run([sys.executable, "-m", "hpctrain", *words], 200, cwd=cluster.folder)
    assert done.returncode == 0, done.stderr
    return cluster.end("whole")["digest"]


def test_a_notice_before_the_time_limit_requeues_and_the_job_finishes(cluster, whole):
    """Slurm looks every 30 s, so the notice comes 30 to 60 s after the start of jobs that need 75.

    With srun all ranks get it, with mpirun the batch shell, which passes it on.
    """
    jobs = {}
    for name, script, who, pace in (
        ("limited", "train.sbatch", "", 0.35),  # four ranks with one shard each
        ("mpirun", "train_mpirun.sbatch", "B:", 0.175),  # two with two each
    ):
        flags = ("--time=00:02:00", f"--signal={who}USR2@60")
        jobs[name] = cluster.submit(script, *SLOW, "--run", name, flags=flags, pace=pace)
    for name, job in jobs.items():
        found = cluster.wait(job, "COMPLETED", "FAILED", "TIMEOUT", seconds=300)
        assert found["JobState"] == "COMPLETED", cluster.log(job)
        assert int(found["Restarts"]) >= 1, cluster.log(job)
        assert cluster.end(name)["digest"] == whole
        records = list(read_records(cluster.folder / "runs" / name))
        assert records[0]["ranks"] == (4 if name == "limited" else 2)
        assert "going on after step" in str(records)


FACTS = """
from hpctrain.parallel.mpi import comm_of_host, start_mpi
from hpctrain.cluster import job_end
comm = start_mpi()
host = comm_of_host(comm)
print("place", comm.rank, host.rank, host.size, flush=True)
if comm.rank == 0:
    print("end", job_end())
"""


def test_ranks_know_their_node_and_the_end_of_their_job(cluster):
    """Nodes are not called as the host is; the last task of an array has the array's number."""
    program = shlex.join([sys.executable, "-c", FACTS])
    flags = ["-N2", "--ntasks-per-node=2", "--time=7", "--output=hpctrain-facts-%A-%a.log"]
    command = f"export OMPI_MCA_mpi_yield_when_idle=1; srun --mpi=pmix {program}"
    job = cluster.call("sbatch", "--parsable", "--array=0-1", *flags, f"--wrap={command}")
    for task in (f"{job}_0", f"{job}_1"):
        found = cluster.wait(task, "COMPLETED", "FAILED")
        log = cluster.log(task.replace("_", "-"))
        places = sorted(re.findall(r"place (\d) (\d) (\d)", log))
        assert places == [("0", "0", "2"), ("1", "1", "2"), ("2", "0", "2"), ("3", "1", "2")], log
        end = float(re.search(r"end (\S+)", log)[1])
        begun = time.mktime(time.strptime(found["StartTime"], "%Y-%m-%dT%H:%M:%S"))
        assert end == begun + 7 * 60


def test_ranks_start_from_the_local_disks_of_their_nodes(cluster):
    """train.sbatch with the line of local_python.sh, and a small environment for it."""
    script, program = cluster.folder / "local.sbatch", ROOT / "slurm" / "local_python.sh"
    base = Path(sys.base_prefix) / "bin" / "python3"
    venv = cluster.folder / "archived" / "venv"
    subprocess.run([base, "-m", "venv", "--without-pip", venv], check=True)
    packages = next(venv.glob("lib/python*/site-packages"))
    (packages / "shared.pth").write_text(sysconfig.get_path("purelib"))
    subprocess.run(
        ["tar", "-czf", "python.tgz", "-C", "archived", "."], cwd=cluster.folder, check=True
    )
    text = (ROOT / "slurm" / "train.sbatch").read_text()
    assert text.count("\n# bin=$(slurm/local_python.sh") == 1
    # Ranks of which Slurm knows only the launch tell where they start from.
    where = "srun --mpi=none sh -c 'echo $SLURMD_NODENAME $(command -v python)'"
    text = text.replace("\n# bin=$(slurm/local_python.sh", f"\nbin=$({program}")
    script.write_text(text.replace("exec python", f"{where}\nexec python"))
    library = f"{sys.prefix}/lib/libmpi.so.40"  # of the environment that the tests run in
    own = {"PMIX_MCA_psec": "native"}
    own |= {"MPI4PY_LIBMPI": library} if Path(library).exists() else {}
    before, cluster.env = cluster.env, {**cluster.env, **own}
    job = cluster.submit(str(script), *TRAIN, "--epochs", "2", "--run", "local")
    cluster.env = before
    found = cluster.wait(job, "COMPLETED", "FAILED", seconds=240)
    assert found["JobState"] == "COMPLETED", cluster.log(job)
    starts = re.findall(
        r"^(n\d) (/tmp/hpctrain-python-\d+-\d+)/venv/bin/python", cluster.log(job), re.M
    )
    assert len(starts) == 4 and len(set(starts)) == 2, cluster.log(job)
    disks = Path(cluster.env["SLURM_CONF"]).parent / "tmp"
    left = {path.relative_to(disks).parts[0] for path in disks.glob("n*/hpctrain-python-*")}
    assert left == {node for node, _ in starts}
    assert cluster.end("local")["status"] == "done"


def test_scancel_ends_for_good(cluster):
    job = cluster.submit("train.sbatch", *SLOW, "--run", "cancelled", pace=0.1)
    cluster.wait_for_step("cancelled", 3)
    cluster.call("scancel", job)
    found = cluster.wait(job, "CANCELLED", "PENDING", "COMPLETED")
    time.sleep(3)
    assert cluster.job(job)["JobState"] == found["JobState"] == "CANCELLED"
    assert found["Restarts"] == "0"
    until = time.monotonic() + 20
    while cluster.ranks() and time.monotonic() < until:
        time.sleep(0.5)
    assert cluster.ranks() == []


def test_a_staged_job_removes_the_copies_of_dead_jobs(cluster):
    disk = cluster.folder / "disk"
    (disk / "hpctrain-job-99999999").mkdir(parents=True)
    cluster.env |= {"PACK": str(cluster.folder / "pack.h5"), "LOCAL_DISK": str(disk)}
    job = cluster.submit("staged.sbatch", *SLOW[2:], "--run", "copied", pace=0.1)
    cluster.wait_for_step("copied", 3, seconds=180)
    assert [folder.name for folder in disk.iterdir()] == [f"hpctrain-job-{job}"]
    assert list(disk.glob("*/hpctrain-*.staged"))
    cluster.call("scancel", job)
    cluster.wait(job, "CANCELLED", "COMPLETED")
    assert cluster.end("copied")["reason"] == "SIGTERM; saved"


def test_a_job_of_higher_priority_preempts_and_the_first_finishes_after_it(cluster, whole):
    job = cluster.submit("train.sbatch", *SLOW, "--run", "preempted", pace=0.1)
    cluster.wait_for_step("preempted", 3)
    urgent = cluster.submit(
        "train.sbatch",
        *TRAIN,
        "--epochs",
        "1",
        "--run",
        "urgent",
        flags=("-p", "high", "-N4", "--ntasks-per-node=1"),
    )
    cluster.wait(urgent, "COMPLETED")
    found = cluster.wait(job, "COMPLETED", "FAILED", seconds=240)
    assert found["JobState"] == "COMPLETED", cluster.log(job)
    assert int(found["Restarts"]) >= 1
    assert cluster.end("preempted")["digest"] == whole


@pytest.mark.parametrize("spare", [0, 1])
def test_a_lost_node_is_excluded_and_a_spare_takes_its_place(cluster, whole, spare):
    """The processes of a node are killed, its slurmd too: Slurm takes the node for alive."""
    name, count = f"lost{spare}", 3
    words = shlex.join([sys.executable, "-m", "hpctrain", "supervise", f"--nodes={count - spare}"])
    step = "srun --mpi=pmix --kill-on-bad-exit=1 " + shlex.join([sys.executable, "-m", "hpctrain"])
    run = shlex.join([*SLOW, "--run", name])
    flags = [f"-N{count}", "--ntasks-per-node=1", "--no-kill", "--output=hpctrain-lost-%j.log"]
    flags += ["--export=ALL,HPCTRAIN_TEST_PACE=0.1"]
    wrap = f"--wrap=exec {words} -- {step} {run}"
    job = cluster.call("sbatch", "--parsable", *flags, wrap)
    cluster.wait_for_step(name, 12)
    hosts = {nodes_of(pid): pid for pid in cluster.ranks()}
    batch = cluster.job(job)["BatchHost"]
    dead = max(set(hosts) - {batch})
    cluster.testbed("kill", dead[1:])
    try:  # the job is completing until the node answers again
        found = cluster.wait(job, "COMPLETING", "COMPLETED", "FAILED", seconds=150)
    finally:
        cluster.testbed("boot", dead[1:])
    log = cluster.log(job)
    assert (found["JobState"] != "FAILED", found["ExitCode"]) == (True, "0:0"), log
    assert f"restarting on 2 nodes, without {dead}, after step" in log
    assert cluster.end(name)["digest"] == whole
    until = time.monotonic() + 60
    while "idle" not in cluster.call("sinfo", "-h", "-n", dead, "-o", "%T"):
        assert time.monotonic() < until
        time.sleep(1)


def nodes_of(pid: int) -> str:
    """The node of the Slurm task that a process is."""
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next(v.split(b"=")[1].decode() for v in variables if v.startswith(b"SLURMD_NODENAME="))


def test_chain_and_staging(cluster):
    """A chain's second job finds the run finished."""
    short = [*TRAIN, "--epochs", "1"]
    chain = cluster.call(
        str(ROOT / "slurm/chain.sh"), "2", str(ROOT / "slurm/train.sbatch"), *short, "--run", "c"
    )
    jobs = re.findall(r"job (\d+)", chain)
    for job in jobs:
        cluster.wait(job, "COMPLETED")
    assert "The run runs/c is finished" in cluster.log(jobs[1])
    cluster.env["PACK"] = str(cluster.folder / "pack.h5")
    staged = cluster.submit("staged.sbatch", *short[2:], "--run", "staged")
    cluster.wait(staged, "COMPLETED")
    assert cluster.end("staged")["digest"] == cluster.end("c")["digest"]


SWEEP = """
[base]
data = "pack.h5"
model = "tests.support.nets:Slow"
epochs = 5
batch_size = 16
shards = 2
deterministic = true
[grid]
seed = [1, 2, 3]
"""


def sweep_digests(cluster, name):
    """Status and digest of each network of a sweep."""
    with open(cluster.folder / "runs" / name / "results.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    runs = [f"{name}/{row['name']}" for row in rows if row["status"] != "waiting"]
    return [row["status"] for row in rows], [cluster.end(run).get("digest") for run in runs]


def hpctrain(cluster, *words):
    """What a subcommand prints outside of a job."""
    done = run([sys.executable, "-m", "hpctrain", *words], 60, cwd=cluster.folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_sweep_as_steps_of_one_job_and_as_a_job_array_that_was_stopped(cluster):
    """Two nodes with two tasks each hold two networks of two ranks side by side. The array trains
    one at a time: network 2 trains when the sweep is stopped, and network 3 is queued. The rest is
    submitted again, and all have the same bits.
    """
    (cluster.folder / "sweep.toml").write_text(SWEEP)
    words = ["--trust-code", "--ranks-per-network", "2", "--run", "steps"]
    program = shlex.join([sys.executable, "-m", "hpctrain", "sweep", "sweep.toml", *words])
    flags = ["-N2", "--ntasks-per-node=2", "--output=hpctrain-steps-%j.log"]
    job = cluster.call("sbatch", "--parsable", *flags, f"--wrap={program}")
    found = cluster.wait(job, "COMPLETED", "FAILED", seconds=200)
    assert found["JobState"] == "COMPLETED", cluster.log(job)
    assert "03-seed=3 begins in slot" in cluster.log(job)
    statuses, digests = sweep_digests(cluster, "steps")
    assert statuses == ["done"] * 3
    assert len(set(digests)) == 3
    prepare = "sweep", "sweep.toml", "--run", "array", "--prepare", "--trust-code"
    line = "slurm/sweep.sbatch runs/array --trust-code\n"
    assert hpctrain(cluster, *prepare).endswith(f"sbatch --array=1-3 {line}")
    words = "sweep.sbatch", "runs/array", "--trust-code"
    first = cluster.submit(*words, flags=("--ntasks=2", "--array=1-3%1"), pace=0.2)
    cluster.wait_for_step("array/02-seed=2", 3, seconds=120)
    assert "is asked to stop" in hpctrain(cluster, "stop", "array")
    for number in (1, 2, 3):
        found = cluster.wait(f"{first}_{number}", "COMPLETED", "FAILED", seconds=200)
        assert found["JobState"] == "COMPLETED", cluster.log(first)
    assert cluster.end("array/02-seed=2")["status"] == "stopped"
    assert "network 3 is not trained" in cluster.log(f"{first}_3")
    assert hpctrain(cluster, *prepare).endswith(f"sbatch --array=2-3 {line}")
    second = cluster.submit(*words, flags=("--ntasks=2", "--array=2-3"))
    for task in (f"{second}_2", f"{second}_3"):
        assert cluster.wait(task, "COMPLETED", "FAILED")["JobState"] == "COMPLETED"
    hpctrain(cluster, "sweep", "runs/array", "--results")
    assert sweep_digests(cluster, "array") == (statuses, digests)
    records = read_records(cluster.folder / "runs/array/02-seed=2")
    assert "going on after step" in str(list(records))


def test_a_notice_to_a_sweep_within_a_job_saves_its_steps(cluster):
    (cluster.folder / "slow.toml").write_text(SWEEP.replace("epochs = 5", "epochs = 30"))
    words = ["slow.toml", "--trust-code", "--ranks-per-network", "2", "--run", "noticed"]
    program = shlex.join([sys.executable, "-m", "hpctrain", "sweep", *words])
    flags = ["-N2", "--ntasks-per-node=2", "--output=hpctrain-noticed-%j.log", "--no-requeue"]
    flags += ["--export=ALL,HPCTRAIN_TEST_PACE=0.25", "--gpus=4"]  # which steps must not inherit
    job = cluster.call("sbatch", "--parsable", *flags, f"--wrap=exec {program}")
    for number in (1, 2):  # side by side
        cluster.wait_for_step(f"noticed/0{number}-seed={number}", 3)
    cluster.call("scancel", "--batch", "--signal=TERM", job)
    found = cluster.wait(job, "FAILED", "COMPLETED", "CANCELLED", seconds=60)
    assert found["ExitCode"] == "75:0", cluster.log(job)
    assert sweep_digests(cluster, "noticed")[0] == ["unfinished", "unfinished", "waiting"]
    ends = [cluster.end(f"noticed/0{number}-seed={number}")["status"] for number in (1, 2)]
    assert ends == ["preempted", "preempted"]
