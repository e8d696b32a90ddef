"""What the first rows of the training split tell about a network before its first step."""

from __future__ import annotations

import numpy as np
import torch

from hpctrain.config import Config
from hpctrain.data.finite import describe_first, find_nonfinite
from hpctrain.data.loader import Prepare, read_rows
from hpctrain.data.source import Source
from hpctrain.errors import UsageError
from hpctrain.keys import random_key
from hpctrain.models import ModelState, check_names
from hpctrain.parallel.batchnorm import BatchNorms, Probe
from hpctrain.parallel.determinism import refusal
from hpctrain.training.replay import ROWS, Listener, Sample, changed_error, is_exact, replay
from hpctrain.training.tasks import Task, output_shape

PROBE_ROWS = 32  # for the first shift of the batch-norm moments


def probe_model(
    norms: BatchNorms, task: Task, source: Source, prepare: Prepare, config: Config
) -> Probe:
    """Look at one training forward of the first rows, and at replays in both modes. UsageError for
    an output or buffers that cannot be combined, for what changes from call to call and, under
    --deterministic, for operations that have no deterministic form.
    """
    model, names = norms.model, set(norms.model.state_dict())
    rows = np.arange(min(PROBE_ROWS, len(source.labels)))
    if bad := describe_first([find_nonfinite(source, rows)]):
        raise UsageError(bad)
    images = read_rows(source, rows, prepare)
    labels = torch.from_numpy(source.labels[rows]).to(images.device)
    key = random_key(config.seed, "probe")
    inputs, targets = task.pair(images, labels, key)
    listener = Listener(model, output_shape(config.task, source.image_shape, task.classes))
    torch.manual_seed(key)
    before = ModelState(model)
    try:
        probe = norms.probe(lambda: task(listener, inputs, targets), len(rows))
        check_names(model, names)
        if config.deterministic:
            check_backward(norms, task, inputs, targets)
    except RuntimeError as error:
        if text := refusal(error):
            raise UsageError(text) from error
        raise
    finally:
        before.restore()
    if not config.local_buffers:
        first = Sample(inputs[:ROWS], targets[:ROWS], key)
        other = Sample(inputs[-ROWS:], targets[-ROWS:], key + 1)
        exact = is_exact(inputs.device, config.deterministic)
        how, changed = (listener, norms, task, first, other), []
        buffers = {name for name, _ in model.named_buffers()}
        for training in (True, False):
            model.train(training)
            with torch.set_grad_enabled(training):
                changed += replay(*how, exact, buffers).names()
        model.train()
        if changed:
            raise changed_error(changed)
    return probe


def check_backward(
    norms: BatchNorms, task: Task, inputs: torch.Tensor, targets: torch.Tensor
) -> None:
    """One backward pass: it meets what torch refuses before training does."""
    loss, _ = task(norms.model, inputs, targets)
    loss.backward()  # not autograd.grad, which reentrant checkpoints refuse
    norms.model.zero_grad()
