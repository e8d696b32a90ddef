"""The closing table of a sweep: best first, and the test never decides."""

from __future__ import annotations

from hpctrain.config import Config
from hpctrain.report.history import Metrics, RunHistory
from hpctrain.sweep.file import Network, Networks
from hpctrain.sweep.results import DONE, Row, ordered, read_known, write_results


def row(name, train, test, *validations):
    """A network with these accuracies; its losses say the contrary."""

    history = RunHistory()
    history.training = Metrics(train, train)
    history.evaluations["test"] = {"loss": test, "accuracy": test}
    history.validations = [Metrics(value, value) for value in validations]
    return Row(Network(1, name, Config(), ""), DONE, None, history)


def names(*rows):
    return [row.network.name for row in ordered(rows)]


def test_networks_are_ordered_by_their_best_validation():
    rows = row("a", 0.9, 1.0, 0.7, 0.8), row("b", 0.5, 0.6, 0.95, 0.7), row("c", 0.6, 0.7, 0.85)
    assert names(*rows) == ["b", "c", "a"]


def test_without_validation_training_decides():
    assert names(row("a", 0.5, 1.0), row("b", 0.9, 0.1)) == ["b", "a"]


def test_no_cell_of_results_csv_is_a_formula_however_often_it_is_written(tmp_path):
    network = Network(1, "01-base", Config(init="=cmd|x", lr=-0.5), "")
    networks = Networks((network,), ("init", "lr"))
    reason = "@SUM(1)"
    for _ in range(2):
        write_results(tmp_path, networks, [Row(network, DONE, reason, RunHistory())])
        _, reason = read_known(tmp_path)["01-base"]
    assert reason == "'@SUM(1)"
    line = (tmp_path / "results.csv").read_text().splitlines()[1]
    assert line.startswith("01-base,done,'@SUM(1),'=cmd|x,-0.5,")
