"""Judge the losses of torch.nn: those that have one value a sample, of outputs and targets alone.

A loss is accepted if for one kind of targets at least its values depend on the sample alone, its
gradient is finite, and unknown entries have no part in it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.errors import UsageError
from hpctrain.tasks.functions import check_values, losses_by_name
from hpctrain.tasks.losses import TARGETS, make_loss
from hpctrain.tasks.task import check_gradient
from scripts.parts import Verdict, part_of

LIBRARY = "torch"
LOGARITHMS = "it takes logarithms of probabilities, and outputs are scores"
SIGNS = "its targets are 1 and -1"
REASONS = {
    "AdaptiveLogSoftmaxWithLoss": "it has parameters of its own",
    "BCELoss": "it takes probabilities, and outputs are scores: BCEWithLogitsLoss takes these",
    "CTCLoss": "it needs lengths of sequences",
    "CosineEmbeddingLoss": "it compares pairs of samples",
    "GaussianNLLLoss": "it needs a variance beside the outputs",
    "HingeEmbeddingLoss": SIGNS,
    "KLDivLoss": LOGARITHMS,
    "LinearCrossEntropyLoss": "it has parameters of its own",
    "MarginRankingLoss": "it compares pairs of samples",
    "MultiLabelMarginLoss": "its targets are lists of classes",
    "MultiLabelSoftMarginLoss": "unknown entries would count in its mean: BCEWithLogitsLoss is the"
    " same without them",
    "NLLLoss": f"{LOGARITHMS}: CrossEntropyLoss takes these",
    "PoissonNLLLoss": "its outputs are rates of counts, and answers would not be values",
    "SoftMarginLoss": SIGNS,
    "TripletMarginLoss": "it compares three samples",
    "TripletMarginWithDistanceLoss": "it compares three samples",
}


def candidates() -> dict[str, Any]:
    """Return the losses of torch.nn."""
    return {f"{LIBRARY}:{name}": getattr(nn, name) for name in dir(nn) if name.endswith("Loss")}


def judge(name: str) -> Verdict:
    """Judge the loss of this name for the targets that it is for."""
    bare = name.partition(":")[2]
    if bare not in TARGETS:
        return Verdict(REASONS.get(bare, "it was not tried"))
    try:
        sample(name)
    except UsageError as error:
        return Verdict(str(error))
    return Verdict()


def sample(name: str) -> None:
    """Try the loss of this name. Raises UsageError."""
    bare = name.partition(":")[2]
    names = ("a", "b", "c")
    for kind in TARGETS[bare]:
        outputs, targets = draw(kind)
        loss = make_loss(part_of("loss", name, {}), kind, names, outputs)
        check_values(loss, losses_by_name, outputs, targets)
        check_gradient(loss, outputs, targets)


def draw(kind: str) -> tuple[Tensor, Tensor]:
    """Return outputs and targets of a kind for 8 samples; of several entries some are NaN."""
    generator = torch.Generator().manual_seed(0)
    if kind == "":
        images = torch.rand(2, 8, 1, 5, 4, generator=generator)
        return images[0], images[1]
    outputs = torch.randn(8, 3, generator=generator)
    if kind == "class":
        return outputs, torch.randint(0, 3, (8,), generator=generator)
    targets = torch.randint(0, 2, (8, 3), generator=generator).float()
    targets[1, 1] = targets[2, 0] = targets[2, 2] = torch.nan
    return outputs, targets
