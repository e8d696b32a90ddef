"""Evaluation and prediction: every image once, the same figures on any number of ranks."""

from __future__ import annotations

import collections
import contextlib
import csv
import dataclasses
import json
import threading
import tracemalloc
import weakref
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import hpctrain.inference.evaluate as evaluation
from hpctrain.config import Config, EvaluateConfig, PredictConfig
from hpctrain.data.loader import make_prepare
from hpctrain.data.packed import read_pack
from hpctrain.data.split import Split
from hpctrain.errors import RunError, UsageError
from hpctrain.inference import blocks, image_files, predict
from hpctrain.inference import network as saved
from hpctrain.inference.blocks import block_key, blocks_of
from hpctrain.inference.evaluate import evaluate
from hpctrain.inference.evaluate import main as evaluate_main
from hpctrain.inference.opening import open_network
from hpctrain.inference.tasks import Classification
from hpctrain.models import build, read_model, save_model, save_tensors
from hpctrain.plan import Facts, resolve
from hpctrain.report import confusion
from hpctrain.report.tables import print_evaluation
from hpctrain.streams import IN_FLIGHT, Snapshot
from hpctrain.training.train import train
from tests.numerics.test_in_flight import NoWaiting
from tests.streams import Recorder, noted
from tests.support.packs import make_pack
from tests.support.spoil import overwrite
from tests.training.runs import short_run

pytestmark = pytest.mark.mpi
ROWS = 101


@pytest.fixture
def network(comm, shared_tmp):
    """A pack and an untrained network saved as a run would save it; (folder, pack, model)."""
    path = shared_tmp / "pack.h5"
    if comm.rank == 0:
        make_pack(path, {"train": 29, "test": ROWS})
    comm.Barrier()
    pack = read_pack(path)
    torch.manual_seed(3)
    model = build("digits", pack.image_shape, 10).eval()
    facts = Facts(comm.size, "cpu", 1, 29, pack.image_shape, 1, 10, pack.uuid, 1)
    if comm.rank == 0:
        config = Config()
        state = {"step": 1}
        save_model(
            shared_tmp / "model.safetensors",
            model,
            saved.describe(config, resolve(config, facts), pack, state),
        )
    comm.Barrier()
    return shared_tmp, pack, model


def test_every_block_is_some_ranks_and_nobody_elses():
    for size in range(1, 9):
        read = [b for rank in range(size) for b in blocks_of(ROWS, 7, size, rank)]
        assert [number for number, _ in read] == list(range(15))
        assert np.array_equal(np.concatenate([rows for _, rows in read]), np.arange(ROWS))
        turns = [list(blocks_of(ROWS, 7, size, rank, in_turns=True)) for rank in range(size)]
        ordered = [b for turn in zip_longest(*turns) for b in turn if b is not None]
        assert [number for number, _ in ordered] == list(range(15))
        assert np.array_equal(np.concatenate([rows for _, rows in ordered]), np.arange(ROWS))


def test_the_figures_are_those_of_one_process(comm, network):
    _, pack, model = network
    with Split(pack, "test") as source:
        result = evaluate(model, source, Classification(classes=10), make_prepare(), comm, 7)
        images = source.gather(np.arange(ROWS), np.empty((ROWS, 28, 28, 1), np.uint8))
    labels = torch.from_numpy(source.labels)
    scores = model(torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255)
    loss = torch.nn.functional.cross_entropy(scores, labels).item()
    assert result.rows == ROWS
    assert result.loss == pytest.approx(loss, rel=1e-5)
    expected = np.zeros((10, 10), np.int64)
    np.add.at(expected, (labels.numpy(), scores.argmax(1).numpy()), 1)
    assert np.array_equal(result.confusion, expected)
    assert result.accuracy == (scores.argmax(1) == labels).double().mean().item()


def test_the_same_bits_on_all_ranks_and_on_one_rank_alone(comm, network):
    _, pack, model = network
    alone = comm.Split(comm.rank)
    with Split(pack, "test") as source:
        together = evaluate(model, source, Classification(classes=10), make_prepare(), comm, 7)
        single = evaluate(model, source, Classification(classes=10), make_prepare(), alone, 7)
    alone.Free()
    assert together.loss == single.loss
    assert np.array_equal(together.confusion, single.confusion)


@pytest.mark.parametrize("gathered", [1, 37, 1 << 21])
def test_21000_classes_need_no_dense_matrix(comm, network, monkeypatch, tmp_path, gathered):
    monkeypatch.setattr(evaluation, "GATHERED", gathered)
    monkeypatch.setattr(confusion, "PENDING", 10)
    _, pack, _ = network
    classes, torch_classes = 21_000, Classification(classes=21_000)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(28 * 28, classes)).eval()
    model[1].bias.data[:10] += 1.0  # some answers are right
    tracemalloc.start()
    with Split(pack, "test") as source:
        found = evaluate(model, source, torch_classes, make_prepare(), comm, 7)
        images = source.gather(np.arange(ROWS), np.empty((ROWS, 28, 28, 1), np.uint8))
    path = tmp_path / "a.json"
    evaluation.write_evaluation(path, found, pack, path, "test")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20, "a matrix takes 3.5 GB"
    labels = source.labels
    answers = model(torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255).argmax(1).numpy()
    right = labels == answers
    assert found.accuracy == right.mean() and 0 < found.accuracy < 1
    recalls = [right[labels == k].mean() for k in np.unique(labels)]
    assert found.balanced_accuracy == pytest.approx(np.mean(recalls), rel=1e-12)
    counted = collections.Counter(zip(labels.tolist(), answers.tolist(), strict=True))
    cells = [each.tolist() for each in found.counts.coordinates()]
    assert dict(zip(zip(*cells[:2], strict=True), cells[2], strict=True)) == counted
    written = json.loads(path.read_text())["confusion"]
    assert list(written.values()) == cells and list(written) == ["true", "predicted", "count"]
    again = confusion.from_json(written, classes)
    assert np.array_equal(again.cells, found.counts.cells)
    if comm.rank == 0 and gathered == 37:  # it takes seconds to print
        names = tuple(map(str, range(classes)))
        print_evaluation({"loss": 1.0, "rows": ROWS}, again, names, "test")


DRAWING = "tests.support.nets:drawing_in_evaluation"


@pytest.fixture
def drawing(comm, shared_tmp):
    """A run of a network that draws random numbers when asked: its folder."""
    if comm.rank == 0:
        make_pack(shared_tmp / "drawn.h5", {"train": 29, "test": ROWS})
    comm.Barrier()
    train(short_run(shared_tmp, "drawn.h5", model=DRAWING, run="a", threads=1), comm)
    return shared_tmp / "runs" / "a"


def test_the_command_draws_the_numbers_of_the_runs_own_test(comm, drawing):
    """Twice, and from whatever state of torch's generator."""
    for seed in range(2):
        torch.manual_seed(seed)
        output = str(drawing / f"{seed}.json")
        asked = EvaluateConfig(run=str(drawing), trust_code=True, output=output, threads=1)
        assert evaluate_main(asked) == 0
    comm.Barrier()
    own, *again = (
        json.loads((drawing / f"{name}.json").read_text()) for name in ("evaluation-test", 0, 1)
    )
    assert [(e["loss"], e["confusion"]) for e in again] == [(own["loss"], own["confusion"])] * 2


def test_numbers_drawn_in_evaluation_belong_to_the_block(comm, drawing, monkeypatch):
    """Figures and answers are those of one rank, other blocks draw other numbers, and what is
    drawn afterwards does not tell that there was an evaluation.
    """
    assert len({block_key(number) for number in range(7)}) == 7
    alone, model = comm.Split(comm.rank), read_again(drawing)
    with Split(read_pack(drawing.parents[1] / "drawn.h5"), "test") as source:
        task, prepare = Classification(classes=10), make_prepare()
        before = torch.get_rng_state()
        together, single, larger = (
            evaluate(model, source, task, prepare, c, block)
            for c, block in ((comm, 7), (alone, 7), (comm, 8))
        )
        assert torch.equal(torch.get_rng_state(), before)
    assert (together.loss, single.loss) == (together.loss, together.loss) != (larger.loss,) * 2
    for name, ranks in (("together", comm), (f"alone{comm.rank}", alone)):
        monkeypatch.setattr(predict, "start_mpi", lambda ranks=ranks: ranks)
        output = str(drawing / name)
        asked = {"run": str(drawing), "trust_code": True}
        settings = PredictConfig(**asked, output=output, batch_size=7, threads=1)
        assert predict.main(settings) == 0
    comm.Barrier()
    alone.Free()
    answers = [(drawing / name).read_bytes() for name in ("together", f"alone{comm.rank}")]
    assert answers[0] == answers[1]


def read_again(folder):
    """The network of a run."""
    return saved.restore(folder / saved.FILE, True).model


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_finds_the_figures_of_the_cpu(comm, network):
    _, pack, model = network
    task, found = Classification(classes=10), []
    with Split(pack, "test") as source:
        for device in ("cpu", "cuda"):
            prepare = make_prepare(device)
            found.append(evaluate(model.to(device), source, task, prepare, comm, 7))
    assert found[0].loss == pytest.approx(found[1].loss, rel=1e-3)  # TF32 is allowed here
    assert found[0].rows == found[1].rows
    assert np.abs(found[0].confusion - found[1].confusion).sum() <= 2


@pytest.mark.parametrize("late", [0, 1, 3])
def test_a_block_is_read_when_later_ones_are_queued(comm, network, monkeypatch, late):
    """The host never waits for the block that it queued last, and the figures are the same."""
    _, pack, model = network
    log, array = [], Snapshot.array
    task, prepare = Classification(classes=10), make_prepare()
    with Split(pack, "test") as source:
        expected = evaluate(model, source, task, prepare, comm, 5)
        model.register_forward_pre_hook(lambda *_: log.append("network"))
        monkeypatch.setattr(Snapshot, "array", lambda self: log.append("read") or array(self))
        monkeypatch.setitem(IN_FLIGHT, "cpu", late)
        with NoWaiting():
            found = evaluate(model, source, task, prepare, comm, 5)
    assert (found.loss, found.confusion.tolist()) == (expected.loss, expected.confusion.tolist())
    blocks = len(list(blocks_of(ROWS, 5, comm.size, comm.rank)))
    first, rest = ["network"] * late, ["network", "read"] * (blocks - late)
    assert log == [*first, *rest, *["read"] * late]


def test_the_block_is_that_of_the_runs_own_test(comm, drawing):
    """64 where the file does not say it."""
    for stored, batch, expected in ((None, None, 64), (23, None, 23), (23, 7, 7)):
        if comm.rank == 0:
            state, metadata = read_model(drawing / saved.FILE)
            metadata.pop("evaluation_rows", None)
            metadata |= {} if stored is None else {"evaluation_rows": stored}
            save_tensors(drawing / saved.FILE, state, metadata)
        comm.Barrier()
        asked = EvaluateConfig(run=str(drawing), trust_code=True, batch_size=batch, threads=1)
        assert open_network(asked, comm).block == expected


def test_blocks_are_read_beside_the_network_and_handed_over(comm, network, monkeypatch):
    _, pack, model = network
    stream = Recorder(monkeypatch)
    task = Classification(classes=10)
    with Split(pack, "test") as source:
        monkeypatch.setattr(source, "gather", noted(stream, "write", source.gather))
        prepare = noted(stream, "prepare", make_prepare())
        evaluate(noted_model(stream, model), source, task, prepare, comm, 7)
    blocks = len(list(blocks_of(ROWS, 7, comm.size, comm.rank)))
    reading = [entry for entry in stream.log if entry[0] not in ("hand over", "network")]
    expected, copied = [("event", 0)], 0
    for block in range(blocks):
        expected += [("wait", copied), ("write", None), ("+event", 2 * block + 1)]
        expected += [("+prepare", None), ("event", 2 * block + 2)]
        copied = 2 * block + 1
    assert reading == expected
    asking = [entry for entry in stream.log if entry[0] in ("hand over", "network")]
    made = range(2, 2 * blocks + 1, 2)
    assert asking == [e for event in made for e in (("hand over", event), ("network", None))]


@pytest.mark.parametrize("late", [0, 1])
def test_blocks_in_flight_do_not_keep_their_tensors(comm, network, monkeypatch, late):
    """Alive are the tensors of the block that is computed and of the next one, which is read."""
    _, pack, model = network
    made, alive, usual = weakref.WeakSet(), [], make_prepare()

    def prepare(images, key):
        made.add(inputs := usual(images, key))
        return inputs

    monkeypatch.setitem(IN_FLIGHT, "cpu", late)
    hook = model.register_forward_pre_hook(lambda *_: alive.append(len(made)))
    with Split(pack, "test") as source:
        evaluate(model, source, Classification(classes=10), prepare, comm, 4)
    hook.remove()
    assert 0 < max(alive) <= 2


def test_a_split_that_cannot_be_read_leaves_the_network_in_its_mode(comm, network, monkeypatch):
    def fail(*_):
        raise RunError("truncated")

    _, pack, model = network
    model.train()
    with Split(pack, "test") as source, pytest.raises(RunError, match="truncated"):
        monkeypatch.setattr(source, "gather", fail)
        evaluate(model, source, Classification(classes=10), make_prepare(), comm, 7)
    assert model.training


def test_an_error_of_the_network_ends_the_reading_thread(comm, network):
    """Before the garbage collector finds the frames that its traceback holds."""

    def fail(*_):
        raise ZeroDivisionError

    _, pack, model = network
    task = Classification(classes=10)
    with Split(pack, "test") as source, pytest.raises(ZeroDivisionError) as kept:
        hook = model.register_forward_pre_hook(fail)
        evaluate(model, source, task, make_prepare(), comm, 7)
    hook.remove()
    assert kept.traceback and not [t for t in threading.enumerate() if t.name.startswith("ahead")]


def noted_model(stream, model):
    """The model, noted whenever it is asked."""
    model.register_forward_pre_hook(lambda *_: stream.note("network"))
    return model


@pytest.mark.parametrize("kept", [1, 5, 1000])
def test_the_most_confident_mistakes_whatever_the_ranks(comm, network, kept):
    _, pack, model = network
    task, prepare = Classification(classes=10), make_prepare()
    with Split(pack, "test") as source:
        found = evaluate(model, source, task, prepare, comm, 7, kept=kept)
        none = evaluate(model, source, task, prepare, comm, 7)
        images = source.gather(np.arange(ROWS), np.empty((ROWS, 28, 28, 1), np.uint8))
    scores = model(torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255)
    sure, answers = scores.softmax(1).max(1)
    wrong = [row for row in range(ROWS) if answers[row] != source.labels[row]]
    assert 5 < len(wrong) < 1000
    wrong.sort(key=lambda row: -sure[row].item())
    told = [(row, label, answer) for row, label, answer, _ in found.mistakes]
    assert told == [(r, source.labels[r], answers[r].item()) for r in wrong[:kept]]
    chances = [each.probability for each in found.mistakes]
    assert chances == pytest.approx(sure[wrong[:kept]].tolist(), rel=1e-5)
    assert none.mistakes == []
    assert (found.loss, found.confusion.tolist()) == (none.loss, none.confusion.tolist())


def test_the_command_writes_json(comm, network):
    folder, pack, _ = network
    settings = EvaluateConfig(
        run=str(folder / "model.safetensors"), output=str(folder / "e.json"), threads=1
    )
    assert evaluate_main(settings) == 0
    comm.Barrier()
    figures = json.loads((folder / "e.json").read_text())
    assert (figures["rows"], figures["pack_uuid"]) == (ROWS, pack.uuid)
    assert np.sum(figures["confusion"]) == ROWS


def test_what_cannot_be_written_is_printed_all_the_same(comm, network, capsys):
    folder = network[0]
    with pytest.raises(RunError, match="cannot write .*nowhere/x.json"):
        evaluate_main(EvaluateConfig(run=str(folder), output=str(folder / "nowhere/x.json")))
    assert comm.rank or f"test: {ROWS} images, loss" in capsys.readouterr().out


def test_predict_writes_a_split_in_order_whatever_the_ranks(comm, network):
    folder, pack, model = network
    settings = PredictConfig(
        run=str(folder / "model.safetensors"),
        output=str(folder / "answers.csv"),
        batch_size=7,
        threads=1,
    )
    assert predict.main(settings) == 0
    comm.Barrier()
    with (folder / "answers.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [int(line["row"]) for line in lines] == list(range(ROWS))
    with Split(pack, "test") as source:
        images = source.gather(np.arange(ROWS), np.empty((ROWS, 28, 28, 1), np.uint8))
        probabilities = model(torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255).softmax(1)
        assert [line["class"] for line in lines] == [f"class{k}" for k in source.labels]
    assert [line["prediction"] for line in lines] == [
        f"class{k}" for k in probabilities.argmax(1).tolist()
    ]
    for line, chance in zip(lines, probabilities.tolist(), strict=True):
        assert float(line["class3"]) == pytest.approx(chance[3], abs=1e-5)


def streamed(folder, comm, monkeypatch, fails_at=None):
    """Predict in blocks of two; also return how many blocks were computed before each write."""
    computed, written, original = [], [], predict.open_predictions
    ask = blocks.network_output
    monkeypatch.setattr(blocks, "network_output", lambda *a: computed.append(0) or ask(*a))

    @contextlib.contextmanager
    def noting(*arguments):
        with original(*arguments) as write:

            def noted_write(names, labels, probabilities):
                if len(written) == fails_at:
                    raise RunError("cannot write it: the disk is full")
                written.append(len(computed))
                write(names, labels, probabilities)

            yield noted_write

    monkeypatch.setattr(predict, "open_predictions", noting)
    model, output = str(folder / "model.safetensors"), str(folder / "streamed.csv")
    predict.main(PredictConfig(run=model, output=output, batch_size=2, threads=1))
    return computed, written


def test_predictions_are_written_block_by_block(comm, network, monkeypatch):
    computed, written = streamed(network[0], comm, monkeypatch)
    blocks = -(-ROWS // 2)
    assert len(computed) == len(range(comm.rank, blocks, comm.size))
    if comm.rank == 0:
        assert len(written) == blocks
        ahead = [done - number // comm.size for number, done in enumerate(written)]
        assert max(ahead) <= 3, "no more than a few blocks are kept"


@pytest.mark.parametrize("block", [0, 1, 4])
def test_a_failed_write_is_an_error_on_all_ranks(comm, network, monkeypatch, block):
    with pytest.raises(RunError, match="the disk is full") as caught:
        streamed(network[0], comm, monkeypatch, fails_at=block)
    assert caught.value.agreed
    comm.Barrier()
    assert not [path for path in network[0].iterdir() if "streamed" in path.name]


def test_images_that_one_rank_cannot_read_are_an_error_on_all_ranks(comm, network, monkeypatch):
    """In the third block of the last rank, when rank 0 has already written other blocks."""
    original, last = Split.gather, comm.rank == comm.size - 1
    read = []

    def gather(self, indices, *more):
        read.append(indices)
        if last and len(read) == 3:
            raise RunError("reading at byte 12 failed")
        return original(self, indices, *more)

    monkeypatch.setattr(Split, "gather", gather)
    with pytest.raises(RunError, match="reading at byte 12 failed") as caught:
        streamed(network[0], comm, monkeypatch)
    assert caught.value.agreed
    comm.Barrier()
    assert not [path for path in network[0].iterdir() if "streamed" in path.name]


def test_predict_answers_what_can_be_read_and_names_the_rest(comm, network):
    """The same on any number of ranks; at most 20 lines."""
    folder, _, _ = network
    photos = folder / "photos"
    if comm.rank == 0:
        photos.mkdir()
        for number in range(29):
            noise = np.random.default_rng(number).integers(0, 256, (40, 30, 3), dtype=np.uint8)
            Image.fromarray(noise).save(photos / f"{number:02}.png")
    comm.Barrier()
    settings = PredictConfig(
        run=str(folder / "model.safetensors"),
        images=(str(photos),),
        output=str(folder / "files.csv"),
        batch_size=2,
        threads=1,
    )
    assert predict.main(settings) == 0
    comm.Barrier()
    whole = (folder / "files.csv").read_text().splitlines()
    assert [Path(line.partition(",")[0]).name for line in whole[1:]] == [
        f"{number:02}.png" for number in range(29)
    ]
    for bad in ([3, 17], [3, *range(5, 27)], list(range(29))):
        comm.Barrier()
        for number in bad if comm.rank == 0 else []:
            (photos / f"{number:02}.png").write_bytes(b"no image")
        comm.Barrier()
        with pytest.raises(RunError, match=f"{len(bad)} of 29 images cannot be used") as caught:
            predict.main(settings)
        assert caught.value.agreed and caught.value.exit_code == 1
        first, *named = str(caught.value).splitlines()
        assert first.endswith("files.csv holds the answers to the others")
        assert [Path(line.split()[0]).name for line in named[:20]] == [
            f"{number:02}.png" for number in bad[:20]
        ]
        assert named[20:] == ([f"  and {len(bad) - 20} more"] if len(bad) > 20 else [])
        left = (folder / "files.csv").read_text().splitlines()
        assert left == [line for row, line in enumerate(whole, -1) if row not in bad]


def test_files_are_decoded_by_threads_while_the_network_computes(
    comm, one_rank, network, monkeypatch
):
    """Two files at a time, and those of the next block before this one is answered."""
    folder, _, _ = network
    photos = folder / f"photos{comm.rank}"
    photos.mkdir()
    for number in range(48):
        Image.new("L", (5, 7), 5 * number).save(photos / f"{number:02}.png")
    together, begun, asked = threading.Barrier(2), threading.Semaphore(0), []
    original, ask = image_files.read_image, blocks.network_output

    def read_image(path, *shape):
        begun.release()
        together.wait(60)
        return original(path, *shape)

    def asking(*arguments):
        number = len(asked)
        blocks = 1 if number == 2 else 2  # whose files are read by now
        for _ in range(16 * blocks if number == 0 else 16 * (blocks - 1)):
            assert begun.acquire(timeout=60)
        asked.append(number)
        return ask(*arguments)

    monkeypatch.setattr(image_files, "read_image", read_image)
    monkeypatch.setattr(blocks, "network_output", asking)
    monkeypatch.setattr(image_files, "decode_threads", lambda: ThreadPoolExecutor(2))
    monkeypatch.setattr(predict, "start_mpi", lambda: one_rank)
    output = folder / f"{photos.name}.csv"
    model, files = str(folder / "model.safetensors"), (str(photos),)
    settings = PredictConfig(run=model, images=files, output=str(output), batch_size=16, threads=1)
    assert predict.main(settings) == 0
    assert asked == [0, 1, 2]
    names = [Path(line.partition(",")[0]).name for line in output.read_text().splitlines()[1:]]
    assert names == [f"{number:02}.png" for number in range(48)]


def test_corrupt_rows_have_no_predictions(comm, network):
    """All rows are in one block, so that every rank reads it."""
    folder, pack, _ = network
    if comm.rank == 0:
        overwrite(pack.path, pack.splits["test"].images_offset)
    comm.Barrier()
    model = str(folder / "model.safetensors")
    found = r"sample \d+ of split 'test' cannot be used \(test/images: rows 0 to 100 \(block 0\)"
    with pytest.raises(RunError, match=found):
        evaluate_main(EvaluateConfig(run=model, batch_size=7, threads=1))
    with pytest.raises(RunError, match=found):
        predict.main(PredictConfig(run=model, output=str(folder / "p"), batch_size=7, threads=1))
    assert not (folder / "p").exists()


@pytest.mark.parametrize("what", ["shape", "classes", "split", "missing"])
def test_a_pack_that_does_not_fit_is_refused(comm, network, what):
    folder, _, _ = network
    other = folder / "other.h5"
    if comm.rank == 0:
        shape = (28, 20, 1) if what == "shape" else (28, 28, 1)
        make_pack(other, {"train": 11, "test": 5}, shape, 7 if what == "classes" else 10)
    comm.Barrier()
    settings = EvaluateConfig(run=str(folder / "model.safetensors"), data=str(other), threads=1)
    if what == "split":
        settings = dataclasses.replace(settings, split="validation")
    if what == "missing":
        settings = dataclasses.replace(settings, run="nowhere")
    words = {
        "shape": "20x28x1.*28x28x1",
        "classes": "7 classes.*10",
        "split": "no split 'validation', only train, test",
        "missing": "no run 'nowhere'",
    }
    with pytest.raises(UsageError, match=words[what]):
        evaluate_main(settings)


def test_an_answer_that_is_not_finite_is_none(comm, network, monkeypatch):
    folder, _, _ = network
    original, asked = blocks.network_output, []

    def ask(*arguments):
        answers = original(*arguments)
        answers[0, 5] = torch.inf if asked else torch.nan
        asked.append(None)
        return answers

    monkeypatch.setattr(blocks, "network_output", ask)
    output = str(folder / "finite.csv")
    run = str(folder / "model.safetensors")
    answers = -(-ROWS // 50)
    with pytest.raises(RunError, match=rf"^{answers} of {ROWS} .*\n  0: the network's answer"):
        predict.main(PredictConfig(run=run, output=output, batch_size=50, threads=1))
    comm.Barrier()
    rows = [int(line.partition(",")[0]) for line in Path(output).read_text().splitlines()[1:]]
    assert rows == [row for row in range(ROWS) if row % 50]
