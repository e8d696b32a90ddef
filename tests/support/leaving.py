"""Runs that leave in a chosen step, as at a notice of the scheduler."""

from __future__ import annotations

import contextlib
from unittest import mock

from tests.support.api import Control


@contextlib.contextmanager
def leave_after(*steps: int):
    """Within this block, each rank votes for leaving in these steps, the first of which is 1."""
    original, begun = Control.requests, []

    def requests(self, *told):
        begun.append(None)
        return [*original(self, *told), *["preempted"] * (len(begun) in steps)]

    with mock.patch.object(Control, "requests", requests):
        yield
