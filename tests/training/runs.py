"""A run under way for tests of the loop: no folder, nothing written."""

from __future__ import annotations

from hpctrain.training.control import Control
from hpctrain.training.progress import Progress, Run
from hpctrain.training.watchdog import Watchdog


def make_run(job, comm, recorder, control=None):
    """What the training loop works with."""
    watchdog = Watchdog(comm.rank, comm.size, "here", 60, lambda code: None)
    return Run(job, comm, recorder, control or Control(None), Progress(), watchdog, None)
