"""How many cores a process may use: quotas of cgroups that are made up, and OpenMP's binding."""

from __future__ import annotations

import os
import sys

import pytest

from tests.support.api import core_count, cpu_quotas
from tests.support.launch import run

V1 = "cgroup cgroup rw,cpu,cpuacct"
V2 = "cgroup2 cgroup2 rw"
CASES = {  # lines of /proc/self/cgroup; root and kind of the mount; files of cgroups -> quotas
    "no cgroups": ("", "/", V2, {}, []),
    "version 2": ("0::/a/b", "/", V2, {"a/b/cpu.max": "150000 100000"}, [1.5]),
    "version 2, above": (
        "0::/a/b",
        "/",
        V2,
        {"a/b/cpu.max": "max 100000", "a/cpu.max": "200000 100000"},
        [2.0],
    ),
    "version 2, both": (
        "0::/a/b",
        "/",
        V2,
        {"a/b/cpu.max": "50000 100000", "a/cpu.max": "800000 200000"},
        [0.5, 4.0],
    ),
    "version 2, without the controller": ("0::/a", "/", V2, {"a/cpu.stat": "usage_usec 1"}, []),
    "version 2, in a container": ("0::/", "/", V2, {"cpu.max": "300000 100000"}, [3.0]),
    "version 2, a path of another namespace": (
        "0::/../../x",
        "/",
        V2,
        {"cpu.max": "300000 100000"},
        [3.0],
    ),
    "version 1": (
        "4:memory:/m\n1:cpu,cpuacct:/a",
        "/",
        V1,
        {"a/cpu.cfs_quota_us": "250000", "a/cpu.cfs_period_us": "100000"},
        [2.5],
    ),
    "version 1, without a limit": (
        "1:cpu,cpuacct:/a",
        "/",
        V1,
        {"a/cpu.cfs_quota_us": "-1", "a/cpu.cfs_period_us": "100000"},
        [],
    ),
    "version 1, the container's cgroup alone is mounted": (
        "1:cpu,cpuacct:/docker/3f",
        "/docker/3f",
        V1,
        {"cpu.cfs_quota_us": "100000", "cpu.cfs_period_us": "50000"},
        [2.0],
    ),
    "both, and the controller is in version 1": (
        "3:cpu:/a:b\n0::/a:b",
        "/",
        V1,
        {"a:b/cpu.cfs_quota_us": "100000", "a:b/cpu.cfs_period_us": "100000"},
        [1.0],
    ),
    "another controller of version 1": (
        "1:cpu:/a",
        "/",
        "cgroup c rw,cpuset",
        {"a/cpu.max": "1 1"},
        [],
    ),
    "garbage": ("0::/a", "/", V2, {"a/cpu.max": "many"}, []),
}


@pytest.mark.parametrize("name", CASES)
def test_quotas_are_those_of_the_cgroup_and_of_all_above(tmp_path, name):
    groups, root, kind, files, quotas = CASES[name]
    mounted, proc = tmp_path / "sys", tmp_path / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text(f"{groups}\n" if groups else "")
    other = "30 1 0:28 / /sys/fs/cgroup rw,relatime shared:4 - tmpfs tmpfs rw,mode=755"
    (proc / "mountinfo").write_text(f"{other}\n41 31 0:38 {root} {mounted} rw,relatime - {kind}\n")
    for file, text in files.items():
        (mounted / file).parent.mkdir(parents=True, exist_ok=True)
        (mounted / file).write_text(f"{text}\n")
    found = cpu_quotas(proc)
    assert [quota.cores for quota in found] == quotas
    assert len({quota.group for quota in found}) == len(quotas)
    assert cpu_quotas(tmp_path / "none") == []
    assert core_count() <= len(os.sched_getaffinity(0))


BOUND = """
import os
import torch
bound = os.sched_getaffinity(0)
from hpctrain.cores import allowed_cores, core_count
from hpctrain.data.images import decode_threads
pool = decode_threads()
print(len(bound), len(allowed_cores()), core_count(), pool._max_workers)
print(len(pool.submit(os.sched_getaffinity, 0).result()))
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_the_cores_of_a_process_are_not_those_to_which_openmp_binds_one_thread():
    """Also where torch was imported first."""
    done = run([sys.executable, "-c", BOUND], env={"OMP_PROC_BIND": "true"})
    cores = len(os.sched_getaffinity(0))
    bound, allowed, usable, decoders, of_decoder = map(int, done.stdout.split())
    assert bound == 1, "what this test is about: else torch's OpenMP binds no longer"
    assert (allowed, usable, of_decoder) == (cores, core_count(), cores)
    assert decoders == min(8, core_count())


FEWER = """
import torch
from torch import nn
import hpctrain as hp
from hpctrain.cores import check_threads, thread_limit
torch.set_num_threads(2)
check_threads(2)
try:
    check_threads(4)
except hp.UsageError as error:
    print(error)
print(thread_limit())
network = nn.Conv2d(1, 16, 3).to(memory_format=torch.channels_last)
images = torch.randn(500, 1, 28, 28).to(memory_format=torch.channels_last)
network(images).sum().backward()  # in a barrier of more threads than OpenMP gives it would not end
"""


def test_openmp_gives_all_threads_or_says_that_it_does_not():
    variables = {"OMP_DYNAMIC": "true", "OMP_MAX_ACTIVE_LEVELS": "0", "OMP_THREAD_LIMIT": "3"}
    done = run([sys.executable, "-c", FEWER], env=variables)
    assert done.returncode == 0
    said = "OMP_THREAD_LIMIT=3 allows fewer than the 4 threads of a rank: unset it"
    assert done.stdout.splitlines() == [said, "3"]
