"""What tests know of hpctrain's inside: every name they use, beyond the command line, is here.

When a module of the package moves, this file changes and no test does. Whole operations come first
(train a run, open a split, draw an order, sum a message): a test that needs the parts of one is a
test of today's code, not of what it promises. The public API is `import hpctrain as hp`.
"""

from __future__ import annotations

from hpctrain.cli import main as command_line
from hpctrain.training.session import run_training as train

__all__ = ["command_line", "train"]

# The tools around a run: record, watch, doctor
from hpctrain import doctor
from hpctrain.data.partition import assign_shards
from hpctrain.parallel.reduce import allreduce
from hpctrain.report.record import FIELDS, read_records, truncate_record
from hpctrain.report.sinks import open_recorder
from hpctrain.watch import web

__all__ += ["FIELDS", "allreduce", "assign_shards", "doctor", "open_recorder"]
__all__ += ["read_records", "truncate_record", "web"]

# Runs and what ends them: checkpoints, heartbeats, hangs, supervision
import time
from types import SimpleNamespace

from hpctrain import watchdog
from hpctrain.training.control import Control
from hpctrain.watchdog import Watchdog


def fake_clock(monkeypatch):
    """Return the clock of watchdogs, moved by `clock.now += seconds`; nobody sleeps."""
    clock = SimpleNamespace(now=1000.0, time=time.time, sleep=lambda seconds: None)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(watchdog, "time", clock)
    return clock


def ranks_as_hosts(patch):
    """Let every rank count as a host of its own, with a disk of its own."""
    patch.setattr("hpctrain.training.staging.comm_of_host", lambda comm: comm.Split(comm.rank))


__all__ += ["Control", "Watchdog", "fake_clock", "ranks_as_hosts"]

# Sums over ranks, and the transports that move their parts
import torch

import hpctrain as hp
from hpctrain.parallel.transport import DeviceMemory, HostMemory, Nccl, Pinned, Transport
from hpctrain.parallel.tree import TreeReduce

__all__ += ["Transport", "TreeReduce", "make_sum", "open_transport"]


def open_transport(comm, name, piece_bytes=None, nccl="", asked=False):
    """Open a transport by the name that --reduce gives it, sending pieces of so many bytes where it
    can; `nccl` is the path of a library. Only if `asked` must MPI take device memory for "mpi-gpu".
    """
    makers = {"mpi": HostMemory, "host": Pinned, "mpi-gpu": DeviceMemory}
    way = Nccl(comm, nccl) if name == "nccl" else makers[name](comm)
    if piece_bytes is not None:
        way.largest = way.piece_bytes = piece_bytes
    if asked:
        way.check(torch.device("cpu"))
    return way


def make_sum(way, vector, runs=None, narrow=0):
    """Return what sums a vector over all ranks, part by part of the shards `runs` in tree order, or
    with its first `narrow` numbers sent in bfloat16.
    """
    layout = SimpleNamespace(length=narrow)
    message = SimpleNamespace(tensor=vector, device=vector.device, layout=layout)
    dtype = "bf16" if narrow else "fp32"
    return hp.choose_reduce(way.comm, message, runs, dtype, way)


# Ranks: what started them, what they agree on, which GPUs they use
from hpctrain import cluster
from hpctrain.parallel import hosts, mpi, transport
from hpctrain.parallel.device import choose_device, memory_of, zeros_for_messages
from hpctrain.parallel.gpus import RankDevice, choose_transport

__all__ += [
    "RankDevice",
    "choose_device",
    "choose_transport",
    "cluster",
    "hosts",
    "memory_of",
    "mpi",
]
__all__ += ["transport", "zeros_for_messages"]

from hpctrain.cores import Quota, core_count, cpu_quotas

__all__ += ["Quota", "core_count", "cpu_quotas"]

# Orders: who reads which samples, and when
from hpctrain.data.orders import Permutation
from hpctrain.data.orders import make_order as make_plain_order


def make_order(name, partition, seed, labels=None, everywhere=False, **blocks):
    """Return the order of this name; the one that draws all classes equally often if it is given
    `labels`, of all samples.
    """
    if labels is not None:
        name, blocks = "global" if everywhere else name, {"classes_of": labels.take}
    return make_plain_order(name, partition, seed, **blocks)


__all__ += ["Permutation", "make_order"]

# Training steps: what is checked before the first one and after each
from hpctrain.streams import IN_FLIGHT  # steps that are begun before the totals of one are read
from hpctrain.tasks.denoise import add_noise
from hpctrain.tasks.task import task_class
from hpctrain.training.checksum import tensor_checksum
from hpctrain.training.compute import Compiled, Eager, Graphs
from hpctrain.training.optimizer import clip_gradient
from hpctrain.training.probe import check_repeats

__all__ += ["IN_FLIGHT", "check_repeats", "clip_gradient", "make_gradients"]
__all__ += ["task_class", "tensor_checksum"]


def make_gradients(model, message, compiled=False, recorder=None):
    """Return the function that adds a batch's gradients to the message, compiled, or replayed from
    what a recorder of graphs made of it.
    """
    backward = (Compiled if compiled else Eager)(model, task_class("classify")(), message)
    return Graphs(backward, recorder) if recorder else backward


# Trained networks: their files, and what a split gives
from hpctrain.models import (
    check_forward,
    load_init,
    load_weights,
    read_model,
    save_model,
)

__all__ += ["check_forward", "load_init", "load_weights"]
__all__ += ["read_model", "save_model"]

# Data: HDF5 files of other programs, random crops, augmentation
from hpctrain.data import (
    drawing,
    external_files,
    file_index,
    strata,
    transform_checks,
    transforms,
)
from hpctrain.data.augment import Augmentation
from hpctrain.data.images import BadImage, Change, Fit, decode, draw_crops
from hpctrain.data.pack import ExternalOptions, images_note
from hpctrain.data.values import decode_stored, read_header

__all__ += ["Augmentation", "ExternalOptions", "add_noise", "draw_crops"]
__all__ += ["images_note", "open_few_files", "opened_for_index", "read_external", "settle_at_once"]
__all__ += ["drawing", "strata", "transform_checks", "transforms"]
__all__ += ["BadImage", "Fit", "decode", "decode_stored", "names_of_changes", "read_header"]


read_external = external_files.open_external


def open_few_files(patch, most):
    """Let readers of sets have so many files open at a time."""
    patch.setattr("hpctrain.data.file_set.MOST_OPEN", most)


def settle_at_once(patch):
    """Let an index be valid for files that were written a moment ago."""
    patch.setattr(file_index, "SETTLED", 0)


def opened_for_index(patch):
    """Return a list to which the path of each file is added that is read for an index."""
    paths = []

    def read_file(path, options, plain=external_files.read_file_of_set):
        paths.append(path)
        return plain(path, options)

    patch.setattr(external_files, "read_file_of_set", read_file)
    return paths


def names_of_changes(changes):
    """The names of the kinds of change in a decoded image."""
    return {change.name for change in Change if changes.kinds & change}


# What a run is: the plan that follows from settings and facts
from hpctrain.plan import Facts, read_plan
from hpctrain.plan import extend as extend_plan
from hpctrain.plan import resolve as resolve_plan
from hpctrain.training.data import check_memory

__all__ += ["Facts", "check_memory", "extend_plan", "read_plan", "resolve_plan"]


# What an evaluation adds up
import numpy as np

from hpctrain.report.answer_plots import plot_curves, plot_values
from hpctrain.tasks.curves import Curves
from hpctrain.tasks.residuals import Residuals
from hpctrain.tasks.scores import Scores

__all__ += ["Curves", "Residuals", "Scores", "plot_curves", "plot_values", "tallied"]

# Metrics and losses of other libraries
from hpctrain.tasks import library_metrics, losses

__all__ += ["library_metrics", "losses"]


def tallied(comm, tally, rows, measured):
    """Merge a tally of `rows` samples in blocks of 7, of which each rank adds some in turn.

    `measured(chosen)` returns the targets of these rows, and what is measured of them.
    """
    blocks = -(-rows // 7)
    for number in range(blocks * comm.rank // comm.size, blocks * (comm.rank + 1) // comm.size):
        chosen = np.arange(7 * number, min(7 * number + 7, rows))
        targets, values = measured(chosen)
        tally.add(SimpleNamespace(number=number, rows=chosen, targets=targets), values)
    tally.merge(comm.allgather(tally.part()), comm)
    return tally


# Parts of other libraries, and functions of the user's own
from hpctrain.config import parts
from hpctrain.config.functions import own_functions, require_trust
from hpctrain.config.parts import build_part, find_part, load_class

__all__ += ["build_part", "find_part", "load_class", "own_functions", "parts"]
__all__ += ["require_trust"]
