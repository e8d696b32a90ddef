"""--checkpoint-activations: less memory, and the same bits."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from hpctrain.config import Config, check_settings
from hpctrain.errors import UsageError
from hpctrain.models import build, checkpoint_activations
from hpctrain.parallel.batchnorm import BatchNorms
from hpctrain.training.live_bytes import LiveBytes
from tests.packs import make_pack
from tests.training.runs import digest, short_run

SHAPE = (32, 32, 3)


def gradients(name, enable, small_stem=False, momentum=None):
    """Output, gradients and buffers of one step, and how often a block ran."""
    torch.manual_seed(0)
    model = build(name, SHAPE, 5, small_stem).train()
    if enable:
        checkpoint_activations(model, name)
    if momentum:
        for layer in model.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.momentum = momentum
    runs = []
    model.layer3[1].register_forward_pre_hook(lambda *_: runs.append(1))
    x = torch.randn(3, 3, 32, 32)
    output = model(x)
    output.square().mean().backward()
    grads = [parameter.grad for parameter in model.parameters()]
    return [output.detach(), *grads, *model.buffers()], len(runs)


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
@pytest.mark.parametrize("momentum", [0.1, 1.0])
def test_a_step_is_bitwise_that_without(name, momentum):
    """Gradients, and batch norm's statistics, at the momentum of torch and that of a run."""
    plain, once = gradients(name, False, momentum=momentum)
    found, twice = gradients(name, True, momentum=momentum)
    assert (once, twice) == (1, 2)
    assert len(plain) == len(found) and all(map(torch.equal, plain, found))


def peak_of_a_step(enable):
    """Bytes of the tensors that are alive at the peak of a step."""
    model = build("resnet50", (64, 64, 3), 5).train()
    if enable:
        checkpoint_activations(model, "resnet50")
    with LiveBytes() as live:
        model(torch.randn(16, 3, 64, 64)).sum().backward()
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    assert gradients <= live.now < 1.01 * gradients  # all that is left
    return live.peak - gradients


def test_less_memory_is_taken():
    assert peak_of_a_step(True) < 0.5 * peak_of_a_step(False)


def test_nothing_is_recomputed_where_nothing_is_kept():
    model = build("resnet18", SHAPE, 5)
    checkpoint_activations(model, "resnet18")
    runs = []
    model.layer1[0].register_forward_pre_hook(lambda *_: runs.append(1))
    model.eval()(torch.randn(2, 3, 32, 32)).sum().backward()
    with torch.no_grad():
        model.train()(torch.randn(2, 3, 32, 32))
    assert len(runs) == 2


def test_batch_norm_counts_each_batch_once():
    torch.manual_seed(0)
    model = build("resnet18", SHAPE, 5).train()
    checkpoint_activations(model, "resnet18")
    norms = BatchNorms(model)
    x = torch.randn(4, 3, 32, 32)
    norms.start(norms.probe(lambda: model(x), 4))
    model(x).sum().backward()
    assert norms.collect(torch.zeros(2, norms.channels), 4, 4) == 0


@pytest.mark.mpi
@pytest.mark.parametrize("given", [{}, {"overlap": 3}, {"batch_norm": "running"}])
def test_a_run_ends_with_the_same_digest(comm, shared_tmp, given):
    if comm.rank == 0:
        make_pack(shared_tmp / "p.h5", {"train": 30, "test": 5}, SHAPE, 3)
    comm.Barrier()
    if comm.size == 1 and "overlap" in given:
        given = {"precision": "bf16"}
    config = short_run(
        *(shared_tmp, "p.h5"),
        model="resnet18",
        shards=4,
        batch_size=16,
        deterministic=True,
        **given,
    )
    plain = digest(config, comm, "plain")
    config = dataclasses.replace(config, checkpoint_activations=True)
    assert digest(config, comm, "checkpointed") == plain
    assert digest(dataclasses.replace(config, epochs=2), comm, "plain") != plain  # may go on so


def own(image_shape, classes):
    """A network of one's own that can recompute."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(image_shape[0] * image_shape[1] * 3, classes))
    model.set_grad_checkpointing = lambda enable: setattr(model, "enabled", enable)
    return model


def test_networks_that_cannot_are_refused():
    for name in ("digits", "autoencoder"):
        shape = (28, 28, 1)
        with pytest.raises(UsageError, match=f"is for resnet18, .* --model {name} has none"):
            checkpoint_activations(build(name, shape, 5), name)
    model = own(SHAPE, 5)
    checkpoint_activations(model, "m:own")
    assert model.enabled
    with pytest.raises(UsageError, match="m:own has batch norm"):
        checkpoint_activations(model.append(nn.BatchNorm1d(5)), "m:own")

    def refuse(enable):
        assert not enable, "gradient checkpointing not supported"

    model = own(SHAPE, 5)
    model.set_grad_checkpointing = refuse
    with pytest.raises(UsageError, match="m:own: AssertionError: gradient checkpointing not"):
        checkpoint_activations(model, "m:own")
    with pytest.raises(UsageError, match="--checkpoint-activations and --compile exclude"):
        check_settings(Config(checkpoint_activations=True, compile=True))
