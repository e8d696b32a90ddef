"""What tests know of hpctrain's inside: every name they use, beyond the command line, is here.

When a module of the package moves, this file changes and no test does. Whole operations come first
(train a run, open a split, draw an order, sum a message): a test that needs the parts of one is a
test of today's code, not of what it promises. The public API is `import hpctrain as hp`.
"""

from __future__ import annotations

from hpctrain.cli import main as command_line
from hpctrain.training.train import run_training as train

__all__ = ["command_line", "train"]

# The tools around a run: record, watch, doctor
from hpctrain import doctor
from hpctrain.report.fields import FIELDS
from hpctrain.report.record import HistoryReader, read_records, truncate_record
from hpctrain.report.recorder import Recorder
from hpctrain.watch import web

__all__ += ["FIELDS", "HistoryReader", "Recorder", "doctor", "read_records"]
__all__ += ["truncate_record", "web"]
