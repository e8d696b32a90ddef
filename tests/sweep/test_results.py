"""The closing table of a sweep: best first, and the test never decides."""

from __future__ import annotations

import json
import socket

from hpctrain.config import Config
from hpctrain.report.history import Metrics, RunHistory
from hpctrain.sweep.display import best_first
from hpctrain.sweep.file import Sweep, SweepNetwork
from hpctrain.sweep.folder import DONE, FAILED, NetworkResult, read_results, write_csv
from tests.support.records import append, end_line, make_run, run_line, step_line


def row(name, train, test, *validations):
    """A network with these accuracies; its losses say the contrary."""

    history = RunHistory()
    history.training = Metrics(train, train)
    history.evaluations["test"] = {"loss": test, "accuracy": test}
    history.validations = [Metrics(value, value) for value in validations]
    return NetworkResult(SweepNetwork(1, name, Config()), DONE, None, history)


def names(*rows):
    return [row.network.name for row in best_first(rows)]


def test_networks_are_ordered_by_their_best_validation():
    rows = row("a", 0.9, 1.0, 0.7, 0.8), row("b", 0.5, 0.6, 0.95, 0.7), row("c", 0.6, 0.7, 0.85)
    assert names(*rows) == ["b", "c", "a"]


def test_without_validation_training_decides():
    assert names(row("a", 0.5, 1.0), row("b", 0.9, 0.1)) == ["b", "a"]


def test_how_a_network_stands_where_nobody_could_record_it(tmp_path):
    network = SweepNetwork(1, "01-a", Config())
    run = make_run(tmp_path / "01-a", run_line(), step_line(1))
    sweep = Sweep((network,), ())
    assert read_results(tmp_path, sweep)["01-a"].status == "unfinished"
    (run / "ranks").mkdir()
    beat = {"rank": 0, "host": socket.gethostname(), "pid": 2**22 + 1, "doing": "step 2"}
    beat |= {"seconds": 1, "time": 1}
    (run / "ranks" / "0.json").write_text(json.dumps(beat))
    found = read_results(tmp_path, sweep)["01-a"]
    assert found.status == "unfinished" and "last heartbeat: step 2" in found.reason
    write_csv(tmp_path, sweep, [NetworkResult(network, FAILED, "signal 9", found.history)])
    found = read_results(tmp_path, sweep)["01-a"]
    assert (found.status, found.reason) == ("failed", "signal 9")
    append(run, end_line("done"))
    assert read_results(tmp_path, sweep)["01-a"].status == "done"
