"""What cannot be used is refused: packs, files, folders, runs, weights, own functions."""

from __future__ import annotations

import json
import shutil

import h5py
import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image

import hpctrain as hp
from tests.support import ranks
from tests.support.packs import make_pack
from tests.support.refused import check_refused, listing, rows

OTHERS = """
sweep | sweep
sweep missing.toml
sweep nothing
sweep photos
sweep done
sweep two.toml --launcher srun | srun Slurm
sweep two.toml --results --run nothing | --results nothing
supervise | supervise
supervise -- mpirun -n 2 hpctrain evaluate done | train evaluate
supervise -- mpirun -n 2 hpctrain --lr fast | --lr fast
supervise --nodes 2 -- mpirun -n 2 hpctrain | --nodes srun
stop | stop
stop nothing
stop don | don done
compare | compare
compare done | compare
compare done nothing | nothing
compare done photos | photos
compare done begun | begun
compare done other --plot figure.gif | --plot figure.gif
compare done other --plot nowhere/figure.png | --plot nowhere/figure.png
compare done other --plot figure.png --tensor nothing | --tensor nothing
plot | plot
plot nothing
plot done --output figure.gif | --output figure.gif
plot done --output nowhere/figure.png | --output nowhere/figure.png
plot done --confusion --split validation | validation evaluate
watch --once --web
watch done --port 5 | --port
watch --runs-dir nowhere | nowhere
export | run
export nothing
export begun
export done --output model.pt | model.pt .onnx .pt2
export done --output there.onnx | there.onnx
pack | pack
pack nothing
pack done --output a.h5 | done
pack good.h5 | good.h5
pack notes.txt --output a.h5 | notes.txt
pack photos --crop --output a.h5 | --crop --size
pack photos --output nowhere/a.h5 | nowhere/a.h5
pack photos --output photos | photos
pack photos --output good.h5 | good.h5 --overwrite
pack photos --output notes.txt --overwrite | notes.txt
pack photos --output a.h5 --manifest nowhere.csv | nowhere.csv
pack empty --output a.h5 | empty
pack sizes --output a.h5 | sizes 5x9 9x9 --size
pack broken --output a.h5 | --skip-bad
pack nobody --output a.h5 --skip-bad | nobody
pack unequal --output a.h5 | unequal train
pack photos --split 0.001,0.999 --output a.h5 | --split train
pack digits --size 3x3 --output a.h5 | size digits
pack digits --encoding jpeg --output a.h5 | encoding digits
pack cut.zip --output a.h5 | cut.zip
pack cut.tgz --output a.h5 | cut.tgz
pack --check missing.h5 | missing.h5
pack --check short.h5 | short.h5
pack --check plain.h5 | plain.h5
pack photos --check good.h5 | --check photos
"""

MANIFESTS = {
    "path,class\na,b\n": "label path class",
    "": "path label",
    "path,label\n": "",
    "path,label\na,b\n,b\n": "3 path",
    "path,label\na,b\nc,\n": "3 label",
    "path,label\na,b\nc,b\n./a,d\n": "2 4 a",
    "path,label,label\na,b,c\n": "label",
    "path,label\na,b\nc,d,e\n": "3",
    "path,label,split\na,b,train\nc,b,holdout\n": "3 holdout",
    "path,label,split\na,b,train\nc,b\n": "3 split",
    "path,label,split,group\na,b,train,1\nc,b,test,1\n": "3 1 train test",
    "path,label\n" + "x" * 200_000 + ",b\n": "",
}

TRAINING = """
--data missing.h5 | missing.h5
--data digit | digit digits
--data photos | photos pack
--data cut.zip | cut.zip pack
--data short.h5 | short.h5
--data foreign.h5 | foreign.h5
--data plain.h5 | plain.h5 --images
--data flipped.h5 --verify start | flipped.h5
--data later.h5 | later.h5 99
--data good.h5 --batch-size 1 | 1 2 --batch-size
--data good.h5 --batch-size 8 --batch-per-rank 2 | --batch-size --batch-per-rank
--data good.h5 --shards 1 | 2 1 shards
--data good.h5 --worker-load 3,1,1 | --worker-load 3 2
--data good.h5 --model resnet17 | --model resnet17 resnet18
--data good.h5 --model vit | --model vit
--data good.h5 --model absent:net | --model absent:net
--data good.h5 --model tests.support.nets:absent | --model tests.support.nets absent
--data good.h5 --model tests/support/nets.py:OneLayer | --model tests.support.nets:OneLayer
--data good.h5 --model tests.support.nets.OneLayer | --model tests.support.nets.OneLayer
--data good.h5 --model a:b:c | --model a:b:c
--data good.h5 --model timm:no_such_network | --model timm:no_such_network
--data good.h5 --model tests.support.nets:TooFewOutputs | 10 classes
--data good.h5 --model tests.support.nets:Remembering | Remembering
--data good.h5 --model broken_network:failing | failing NameError broken_network.py
--data good.h5 --model broken_network:without | without parameters
--data good.h5 --model broken_network:nothing | nothing NoneType
--data good.h5 --model broken_network:number | number
--data good.h5 --model broken_import:net | broken_import ZeroDivisionError
--data good.h5 --small-stem | --small-stem digits
--data tiny.h5 --model digits | digits 4x4 5x5
--data good.h5 --init missing.pth | missing.pth
--data good.h5 --init nothing | nothing
--data good.h5 --init notes.txt | notes.txt
--data good.h5 --init short.safetensors | short.safetensors
--data good.h5 --init flipped.safetensors | flipped.safetensors SHA-256
--data good.h5 --init object.pt | object.pt
--data good.h5 --init other_network.pt | other_network.pt
--data three.h5 --init nan.pt | nan.pt fc.bias
--data good.h5 --init begun | begun
--data good.h5 --freeze x* | --freeze x*
--data good.h5 --freeze * | --freeze all
--data good.h5 --lr-factors blocks=0.1 | --lr-factors blocks
--data good.h5 --no-decay embed --weight-decay 0.1 | --no-decay embed
--data good.h5 --class-weights 1,2 | --class-weights 2 10
--data good.h5 --shift 28 | --shift 28 27
--data good.h5 --shift -1 | --shift -1
--data good.h5 --normalize imagenet | --normalize 3 1
--data good.h5 --random-crop 0.5 | --random-crop jpeg
--data good.h5 --balanced-sampling --shuffle blocks | --balanced-sampling --shuffle
--data good.h5 --final best | --final validation
--data good.h5 --patience 3 | --patience validation
--data good.h5 --reduce nccl | --reduce nccl
--data good.h5 --reduce mpi-gpu | --reduce mpi-gpu
--data good.h5 --device cuda | --device cuda
--data good.h5 --cuda-graphs | --cuda-graphs
--data good.h5 --stage notes.txt | --stage notes.txt
--data good.h5 --images x --labels y | good.h5 x
--data flat.h5 --normalize pack | --normalize pack
--data good.h5 --run done --resume never | done --run
--data good.h5 --run photos --runs-dir . | photos --run
--data good.h5 --run new --resume must | --resume new
--data digits --cache-dir notes.txt | --cache-dir notes.txt
--data flowers --cache-dir notes.txt | --cache-dir notes.txt
"""
CONTINUED = """
--lr 0.5 | done --lr 0.5
--model resnet18 | done --model resnet18
--shards 5 | done --shards 5
--batch-size 7 | done --batch-size 7
--seed 1 | done --seed 1
--run half --epochs 1 | half --epochs 1 2
--run damaged | damaged plan.json
--run stopped --resume must | stopped checkpoint
"""
OWN = {
    "loss": "mean per_class number failing draws_from_torch draws_from_numpy draws_from_python"
    " counts_calls of_the_batch in_place detached correct not_finite"
    " steep absent squeezed of_three Focal",
    "metric": "mean largest taken nothing of_the_batch by_class",
    "augment": "mirror_by_torch mirror_by_numpy crop squeezed_images to_double to_nothing overflow"
    " failing",
}
EXTERNAL = """
--images z | z
--images a/b/c | a/b/c
--images '' | arrays.h5
--images g | g
--images x/y | x/y
--images away.h5:x | away.h5
--images '{split}/x' | {split}/x
--labels short | short 41 61
--labels names | names
--labels halves | halves
--labels nan | nan
--labels two_hot | two_hot
--labels linked | linked
--layout NHW | NHW
--images flat | flat NHWC
--images turned | turned NCHW --layout
--images signed | signed int16
--images bytes | bytes --max-value
--images infinite | infinite 60
--images unwritten | unwritten
--images half | half 60
--images elsewhere | elsewhere
--split 0.999,0.001 | --split test
--normalize pack | --normalize pack
--stage . | --stage
--random-crop 0.5 | --random-crop
--max-value -1 | --max-value -1
"""
RESULTS = """
evaluate | run
evaluate nothing
evaluate don | don done
evaluate photos
evaluate begun
evaluate swept --trust-code | swept --best
evaluate done --split validation | validation train test
evaluate done --data missing.h5 | missing.h5
evaluate done --data tiny.h5 | tiny.h5 4x4 done
evaluate done --data short.h5 | short.h5
evaluate done --device cuda | --device cuda
evaluate done --loss tests.support.own_functions:mean | --loss tests.support.own_functions:mean
evaluate done --metric absent:metric | --metric absent:metric
evaluate own.safetensors | own.safetensors mine:net --trust-code
evaluate moved.safetensors | moved.safetensors away.h5 --data
evaluate short.safetensors
evaluate shape.safetensors | shape.safetensors image_shape
evaluate classes.safetensors | classes.safetensors classes
evaluate flipped.safetensors
evaluate foreign.h5
predict | run
predict nothing
predict done missing.png | missing.png
predict done bad | bad
predict done --split validation | validation
"""
BROKEN_NETWORK = """
from torch import nn

def failing(image_shape, classes): return nn.Linear(width, 5)
def without(image_shape, classes): return nn.Flatten()
def nothing(image_shape, classes): pass
number = 3
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with right files and wrong ones."""
    place = tmp_path_factory.mktemp("place")
    make_packs(place)
    make_images(place)
    make_arrays(place / "arrays.h5")
    texts = {
        "notes.txt": "no data",
        "there.onnx": "mine",
        "two.toml": f"[base]\ndata = '{place}/good.h5'\n[grid]\nseed = [1, 2]\n",
        "broken_network.py": BROKEN_NETWORK,
        "broken_import.py": "1 / 0\n",
    }
    for name, text in texts.items():
        (place / name).write_text(text)
    make_runs(place)
    make_weights(place)
    return place


def make_packs(place):
    make_pack(place / "good.h5", {"train": 101, "test": 11})
    make_pack(place / "three.h5", {"train": 61, "test": 13}, classes=3)
    make_pack(place / "tiny.h5", {"train": 61, "test": 13}, shape=(4, 4, 1), classes=3)
    data = bytearray((place / "good.h5").read_bytes())
    (place / "short.h5").write_bytes(data[:-1000])
    with h5py.File(place / "good.h5") as file:
        image = file["train/images"][50].tobytes()
    data[data.index(image) + 100] ^= 1
    (place / "flipped.h5").write_bytes(data)
    (place / "foreign.h5").write_bytes(b"\xff\xd8\xff\xe0 not HDF5")
    shutil.copy(place / "good.h5", place / "later.h5")
    with h5py.File(place / "later.h5", "a") as file:
        file.attrs["version"] = 99
    with h5py.File(place / "plain.h5", "w") as file:
        file["x"] = np.zeros((5, 4, 4, 1), np.uint8)
    gray = np.full((61, 28, 28, 1), 7, np.uint8), np.arange(61) % 3
    hp.write_pack(place / "flat.h5", {"train": gray, "test": gray}, ("a", "b", "c"))


def make_images(place):
    rng = np.random.default_rng(0)

    def save(name, width=9):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (9, width), np.uint8)).save(place / name)

    for number in range(20):
        save(f"photos/{'ab'[number % 2]}/{number}.png")
    for name in ("a/1", "a/2", "b/1", "b/2"):
        save(f"broken/{name}.png")
        save(f"unequal/val/{name}.png")
        save(f"unequal/test/{name}.png")
        save(f"sizes/{name}.png", width=5 if name[0] == "a" else 9)
    (place / "broken/b/2.png").write_bytes(b"no image")
    for name in ("nobody/a/1.png", "bad/none.txt"):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(b"no image")
    (place / "empty/a").mkdir(parents=True)
    for kind, suffix in (("zip", "zip"), ("gztar", "tar.gz")):
        shutil.make_archive(str(place / "whole"), kind, place / "photos")
        data = (place / f"whole.{suffix}").read_bytes()
        (place / f"cut.{suffix.replace('tar.gz', 'tgz')}").write_bytes(data[: len(data) // 2])
        (place / f"whole.{suffix}").unlink()


def make_arrays(path):
    """An HDF5 file as other people make them, with wrong datasets beside the right ones."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (61, 8, 8, 3), np.uint8)
    labels = rng.integers(0, 3, 61)
    infinite = (images / 255).astype("f4")
    infinite[60, 2, 1, 0] = np.inf
    two_hot = np.eye(3)[labels]
    two_hot[5] = 0, 1, 1
    wrong = {
        "short": labels[:41],
        "names": np.array([b"cat"] * 61),
        "halves": labels / 2,
        "nan": np.where(np.arange(61) == 5, np.nan, labels),
        "two_hot": two_hot,
        "flat": images.reshape(61, -1),
        "turned": images.transpose(0, 3, 1, 2),
        "signed": images.astype("i2"),
        "bytes": images.astype("f4"),
        "infinite": infinite,
    }
    with h5py.File(path, "w") as file:
        file["x"], file["y"], file["g/x"] = images, labels, images
        for name, values in wrong.items():
            file[name] = values
        file.create_dataset("unwritten", images.shape, "u1")
        file.create_dataset("half", images.shape, "u1", chunks=(1, 8, 8, 3))[:60] = 1
        external = [("elsewhere.bin", 0, images.size)]
        file.create_dataset("elsewhere", images.shape, "u1", external=external)
        file["linked"] = h5py.ExternalLink("nowhere.h5", "/y")


def make_runs(place):
    runs = ["--runs-dir", place / "runs"]
    train = ["--data", "three.h5", "--epochs", "2", "--batch-size", "16", "--threads", "1"]
    for name in ("done", "other"):
        ended = ranks.command(2, *train, "--run", name, "--progress", "none", cwd=place)
        assert ended.code == 0, ended.err
    for name in ("half", "begun", "damaged", "stopped"):
        shutil.copytree(place / "runs/done", place / "runs" / name)
        (place / f"runs/{name}/model.safetensors").unlink()
        record = place / f"runs/{name}/progress.jsonl"
        lines = record.read_text().splitlines(keepends=True)
        record.write_text("".join(line for line in lines if '"kind": "end"' not in line))
    plan = place / "runs/damaged/plan.json"
    plan.write_text(plan.read_text().replace('"seed": 0', '"seed": 1'))
    shutil.rmtree(place / "runs/stopped/checkpoints")
    ended = ranks.alone("sweep", place / "two.toml", "--prepare", "--run", "swept", *runs)
    assert ended.code == 0, ended.err


#: Weights with other metadata.
CHANGED = {
    "own.safetensors": {"model": "mine:net"},
    "moved.safetensors": {"pack": "away.h5"},
    "shape.safetensors": {"image_shape": [28, 28]},
    "classes.safetensors": {"classes": 5},
}


def make_weights(place):
    whole = place / "runs/done/model.safetensors"
    data = bytearray(whole.read_bytes())
    (place / "short.safetensors").write_bytes(data[:-100])
    data[-100] ^= 1
    (place / "flipped.safetensors").write_bytes(data)
    tensors = safetensors.torch.load_file(whole)
    with safetensors.safe_open(whole, "pt") as file:
        metadata = json.loads(file.metadata()["hpctrain"])
    for name, change in CHANGED.items():
        text = json.dumps({**metadata, **change})
        safetensors.torch.save_file(tensors, place / name, {"hpctrain": text})
    torch.save({"net": object}, place / "object.pt")
    torch.save({"a.weight": torch.ones(3, 2)}, place / "other_network.pt")
    nan = {**tensors, "fc.bias": torch.full_like(tensors["fc.bias"], torch.nan)}
    torch.save(nan, place / "nan.pt")


TRAIN = ["--threads", "1", "--progress", "none"]
BEGUN = ["--data", "three.h5", "--run", "done", "--epochs", "2", "--batch-size", "16"]
ARRAYS = ["--model", "digits", "--data", "arrays.h5", "--images", "x", "--labels", "y"]


@pytest.fixture
def refused(place, monkeypatch):
    """Check that a command is refused on so many ranks, 0 = in this process, and writes nothing."""

    def refused(n, words, names):
        before = listing(place)
        monkeypatch.chdir(place)
        ended = ranks.command(n, *words, cwd=place) if n else ranks.alone(*words)
        check_refused(ended, names)
        assert listing(place) == before

    return refused


@pytest.mark.parametrize(("words", "names"), rows(OTHERS))
def test_what_one_process_cannot_do_is_named(refused, words, names):
    refused(0 if words[0] in ("sweep", "supervise") else 1, words, names)


@pytest.mark.parametrize("text", MANIFESTS)
def test_a_mistake_in_a_manifest_is_named(place, refused, text):
    (place / "labels.csv").write_text(text)
    names = MANIFESTS[text].split() or ["labels.csv"]
    refused(1, ["pack", "labels.csv", "--output", "a.h5"], names)


@pytest.mark.parametrize(("words", "names"), rows(TRAINING))
def test_what_cannot_be_trained_is_named(refused, words, names):
    refused(2, [*TRAIN, *words], names)


@pytest.mark.parametrize(("words", "names"), rows(CONTINUED))
def test_a_run_goes_on_as_it_was_begun(refused, words, names):
    refused(2, [*TRAIN, *BEGUN, *words], names)


@pytest.mark.parametrize(
    ("setting", "name"), [(setting, name) for setting in OWN for name in OWN[setting].split()]
)
def test_an_own_function_that_breaks_the_rules_is_named(refused, setting, name):
    function = f"tests.support.own_functions:{name}"
    words = ["--data", "three.h5", f"--{setting}", function]
    refused(2, [*TRAIN, *words], [f"--{setting}", function])


@pytest.mark.parametrize(("words", "names"), rows(EXTERNAL))
def test_arrays_that_cannot_be_used_are_named(refused, words, names):
    refused(2, [*TRAIN, *ARRAYS, *words], names)


@pytest.mark.parametrize(("words", "names"), rows(RESULTS))
def test_what_cannot_be_evaluated_is_named(refused, words, names):
    refused(2, words, names)
