"""What --loss and --metric name: functions of the user's own, and parts of other libraries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from hpctrain.config.functions import Imported, texts_of
from hpctrain.config.metrics import name_metrics
from hpctrain.config.parts import find_part, is_part
from hpctrain.tasks.facts import FACTS
from hpctrain.tasks.functions import Loss, import_own

if TYPE_CHECKING:
    from hpctrain.tasks.library_metrics import LibraryMetric


class Measures(NamedTuple):
    """A loss in place of the task's, and metrics beside its figures."""

    loss: Loss | None = None
    metrics: tuple[Imported, ...] = ()  # of the user's own
    library_metrics: tuple[LibraryMetric, ...] = ()


def load_measures(
    settings: Mapping[str, Any], task: str, names: Sequence[str], like: Tensor
) -> Measures:
    """Import what the settings "loss" and "metric" name. Raises UsageError.

    `names` are those of the classes, or of the columns of values; a loss computes on the device and
    in the dtype of `like`. A library is imported only if a part of it is named.
    """
    kind = FACTS[task].targets
    texts = texts_of(settings["metric"])
    functions = (import_own(text, "--metric") for text in texts if not is_part("metric", text))
    library_metrics: tuple[LibraryMetric, ...] = ()
    if named := name_metrics(texts):
        from hpctrain.tasks.library_metrics import make_metrics

        library_metrics = make_metrics(named, kind, names)
    return Measures(
        loss=load_loss(settings["loss"], kind, names, like),
        metrics=tuple(functions),
        library_metrics=library_metrics,
    )


def load_loss(text: str | None, kind: str, names: Sequence[str], like: Tensor) -> Loss | None:
    """Return the loss that a setting names, if any. Raises UsageError."""
    if text is None:
        return None
    if not is_part("loss", text):
        return import_own(text, "--loss")
    from hpctrain.tasks.losses import make_loss

    return make_loss(find_part("loss", text), kind, names, like)
