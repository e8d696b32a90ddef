"""What cannot be used is refused: settings, files of them, packs, folders, runs, own functions.

One row for each check. Of settings each bound has one: numbers of all options are parsed alike, and
their choices, which are in surface.json, are compared alike. Damaged packs are in test_pack.py.
"""

from __future__ import annotations

import json
import shutil

import h5py
import numpy as np
import pytest
import safetensors.torch
import torch

import hpctrain as hp
from tests.support import ranks
from tests.support.packs import draw_entries, make_pack
from tests.support.pictures import class_folders
from tests.support.refused import check_refused, listing, rows

#: Values out of bounds, and options that refuse them.
BOUNDS = {
    "0": "--epochs --batch-size --batch-per-rank --shards --threads --keep-checkpoints"
    " --step-epochs --lr --clip-norm --noise-level",
    "-1": "--patience --overlap --weight-decay --min-lr --warmup-epochs",
    "-0.1": "--momentum --label-smoothing --random-crop",
    "1": "--momentum --label-smoothing",
    "1.5": "--noise-level --random-crop",
}
SETTINGS = """
--epochs 2.5
--epochs '' | --epochs
--images '' | --images
--threads 100000
--overlap 65
--seed x
--seed 9223372036854775808
--lr fast
--lr nan
--ema 0 --final ema | --ema 0
--ema 1 --final ema | --ema 1
--max-value 0 --images x --labels y | --max-value 0
--max-value 1e39 --images x --labels y | --max-value 1e39
--optimizer sgd | --optimizer sgd sgdm
--schedule cosin | --schedule cosin cosine
--validate-every 2
--validate-every 0steps
--validate-every 10m
--checkpoint-every 5
--checkpoint-every 0s
--time-limit 0
--time-limit 1:2
--time-limit 99999999h
--hang-timeout soon
--read-buffer 0
--read-buffer 1E
--split 0.9,0.2 --images x --labels y | --split 0.9,0.2
--split a,b --images x --labels y | --split a,b
--split 0,1 --images x --labels y | --split 0,1
--run '' | --run
--run ..
--run a/b
--worker-load 3,x
--worker-load 3,0
--class-weights 1,x
--class-weights 1,0
--lr-factors fc
--lr-factors fc=0
--lr-factors =1
--freeze a,,b
--no-decay a,,b --weight-decay 0.1 | --no-decay a,,b
--no-decay bias | --no-decay --weight-decay
--target-scale none | --target-scale --task
--task regress --target-scale mean | --target-scale mean std
--task regress --class-weights balanced
--task regress --label-smoothing 0.1
--task regress --balanced-sampling
--task multilabel --balanced-sampling
--min-lr 0.1 | --min-lr --schedule
--min-lr 0.1 --schedule cosine | --min-lr 0.1 --lr 0.01
--schedule one-cycle --warmup-epochs 1 | one-cycle --warmup-epochs
--ema 0.9 | --ema 0.9 --final
--final ema | --final ema --ema
--overlap 2 --cuda-graphs
--deterministic --comm-dtype bf16
--images x | --images --labels
--labels y | --images --labels
--layout NHWC | --layout --images
--split 0.9,0.1 | --split --images
--group file | --group --images
--group patient --images x --labels y | --group patient file
--loss mine:f --label-smoothing 0.1 | --loss mine:f --label-smoothing
--balanced-sampling --class-weights balanced
--task multilabel --class-weights 1,2,3 --loss a:b | --class-weights --loss
--task denoise --class-weights balanced | --class-weights denoise
--task denoise --normalize imagenet | --normalize denoise
--task denoise --label-smoothing 0.1 | --label-smoothing denoise
--lr | --lr
--flip=yes | --flip yes
--trust-code=yes | --trust-code yes
--bach-size 3 | --bach-size --batch-size
--learning-rate 1 | --learning-rate --lr
--learning_rate=1 | --learning_rate --lr
--gpus 4 | --gpus mpirun
--keep 3 | --keep --keep-checkpoints
--output last | --output --final last
--output=best | --output --final best
--output x | --output --runs-dir
--scale 255 | --scale --max-value
--lr-scale linear | --lr-scale --scale-lr
--nodes 2 | --nodes mpirun
--per_device_train_batch_size 8 | --batch-per-rank
--workers 4 | --workers mpirun --threads
--backend nccl | --backend --reduce
--accumulate 4 | --accumulate --shards
--freeze conv1 bn1 | --freeze conv1,bn1
--class-weights 1 2 | --class-weights 1,2
train more | more
train -x 3 | -x
trian | trian train
validate | validate evaluate
cancel a | cancel stop
status | status watch
diff a b | diff compare
'' | subcommand
evaluate a --batch-size 0 | --batch-size 0
evaluate a --threads 0 | --threads 0
evaluate a --mistakes -1 | --mistakes -1
evaluate a --output '' | --output
evaluate a b | b
predict a --figure 1001 | --figure 1001
export a --batch-size 0 | --batch-size 0
export a --to onnx | --to
pack photos --size 3 | --size 3
pack photos --size 0x3 | --size 0x3
pack photos --size 3x99999 | --size 3x99999
pack photos --sise 3x3 | --sise --size
pack photos --channels 2 | --channels 2
pack photos --split 0.9 | --split 0.9
pack photos --split 0.5,0.2,0.2,0.1 | --split 0.5,0.2,0.2,0.1
pack photos --fold 5 | --fold 5
pack photos --fold 0/5 | --fold 0/5
pack photos --fold 6/5 | --fold 6/5
pack photos --fold 1/1 | --fold 1/1
pack photos --jobs 0 | --jobs 0
sweep two.toml --slots 0 | --slots 0
sweep two.toml --ranks-per-network 0 | --ranks-per-network 0
sweep two.toml --run a/b | --run a/b
supervise --max-failures 0 -- false hpctrain | --max-failures 0
supervise --nodes 0 -- false hpctrain | --nodes 0
supervise --lr 1 | --lr --
watch a --port -1 | --port -1
watch a --port 65536 | --port 65536
doctor mpi | mpi
stop a b | b
compare a b c | c
plot --lr 3 | --lr
"""
FILES = """
--config missing.toml
--config bad/unfinished.toml | bad/unfinished.toml
--config bad/twice.toml | bad/twice.toml
--config bad/bytes.toml | bad/bytes.toml
--config bad/table.toml | bad/table.toml train
--config bad/unknown.toml | bad/unknown.toml epoch epochs
--config bad/three.toml | bad/three.toml --epochs three
--config bad/list.toml | bad/list.toml lr
--config bad/switch.toml | bad/switch.toml flip yes
--config bad/number.toml | bad/number.toml epochs True
--config bad/choice.toml | --resume perhaps
--config bad/trust.toml --trust-code | bad/trust.toml trust_code
--config bad/model.toml | bad/model.toml mine:net --trust-code
--config bad/loss.toml | bad/loss.toml mine:loss --trust-code
--config bad/timm.toml | bad/timm.toml timm:list_models --trust-code
--config bad/loss.toml --loss other:loss --metric other:m | bad/loss.toml mine:images --trust-code
"""
TOML = {
    "unfinished": "epochs = ",
    "twice": "epochs = 1\nepochs = 2\n",
    "bytes": "\udcb0\udcff",
    "table": "[train]\nepochs = 2\n",
    "unknown": "epoch = 2\n",
    "three": 'epochs = "three"\n',
    "list": "lr = [1, 2]\n",
    "switch": "flip = 'yes'\n",
    "number": "epochs = true\n",
    "choice": "resume = 'perhaps'\n",
    "trust": "trust_code = true\n",
    "model": 'model = "mine:net"\n',
    "timm": 'model = "timm:resnet18"\nmetric = "timm:list_models"\n',
    "loss": 'loss = "mine:loss"\naugment = "mine:images"\n',
}

SWEEPS = {
    "": "grid variant",
    "a = " + "[" * 10_000: "sweep.toml TOML",
    "[grid]": "grid",
    "[grid]\nlr = []": "lr []",
    "[grid]\nlr = 0.1": "lr 0.1",
    "[grid]\nlr = [0.1, 0.1]": "01-lr 02-lr",
    "[grids]\nlr = [1]": "grids grid",
    "grid = 3": "grid",
    "[variant]\nlr = 0.1": "[[variant]]",
    "[grid]\nlr = [1]\n[base]\nepoch = 1": "base epoch epochs",
    "[grid]\nlearning = [1]": "grid learning",
    "[grid]\nlr = ['much']": "grid --lr much",
    "[grid]\nlr = [[1, 2]]": "grid lr",
    "[grid]\noptimizer = ['lion']": "--optimizer lion",
    "[grid]\nlr = [-1.0]": "grid --lr -1",
    "[grid]\nlr = [1]\n[base]\nrun = 'a'": "base run",
    "[grid]\nruns_dir = ['a']": "grid runs_dir",
    "[[variant]]\nname = 3\nlr = 1": "name 3",
    "[[variant]]\nname='a'\nlr=1\n[[variant]]\nname='a'\nlr=2": "variant a",
    f"[grid]\nseed = {[*range(101)]}\nlr = {[n + 1 for n in range(100)]}": "10,100",
    "trust_code = true\n[grid]\nlr = [1]": "trust_code",
    "[base]\ntrust_code = true\n[grid]\nlr = [1]": "trust_code",
    "[base]\nmodel = 'mine:net'\n[grid]\nlr = [1]": "mine:net --trust-code",
    "[base]\ndata = 'away.h5'\n[grid]\nlr = [1]": "--data away.h5",
    "[base]\ndata = 'text.h5'\n[grid]\nlr = [1]": "text.h5",
}
OTHERS = """
sweep | sweep
sweep nothing
sweep nothing.toml | "no file"
sweep photos
sweep two.toml --launcher srun | srun Slurm
sweep two.toml --results --run nothing | --results nothing
supervise | supervise
supervise -- mpirun -n 2 hpctrain evaluate done | train evaluate
supervise -- mpirun -n 2 hpctrain --lr fast | --lr fast
supervise --nodes 2 -- mpirun -n 2 hpctrain | --nodes srun
stop | stop
compare done | compare
compare done photos | photos
compare done begun | begun
plot | plot
plot done --output figure.gif | --output figure.gif
plot done --output nowhere/figure.png | --output nowhere/figure.png
plot done --confusion --split validation | validation evaluate
watch --once --web | --once --web
watch done --port 5 | --port
watch --runs-dir nowhere | nowhere
export | run
export begun
export done --output model.pt | model.pt .onnx .pt2
pack | pack
pack nothing
pack done --output a.h5 | done
pack good.h5 | good.h5
pack photos --crop --output a.h5 | --crop --size
pack photos --output nowhere/a.h5 | nowhere/a.h5
pack photos --output photos | photos
pack photos --output a.h5 --manifest nowhere.csv | nowhere.csv
pack photos --split 0.001,0.999 --output a.h5 | --split train
pack digits --size 3x3 --output a.h5 | size digits
pack digits --encoding jpeg --output a.h5 | encoding digits
pack digits --task regress --output a.h5 | task digits
pack shapes --tiles 3x3 --output a.h5 | tiles shapes
pack photos --task regress --output a.h5 | --task regress photos table
pack nothing.csv --targets age --output a.h5 | source nothing.csv cannot be read
pack photos --targets age --output a.h5 | --targets age --manifest
pack photos --targets age,age --output a.h5 | --targets age,age
pack --check plain.h5 | plain.h5
pack photos --check good.h5 | --check photos
"""

MANIFESTS = {
    "path,class\na,b\n": "label path class",
    "": "path label",
    "path,label\n": "",
    "path,label\na,b\n,b\n": "3 path",
    'path,label,note\n\na,b,"two\nlines"\n,b\n': "line 5 path",
    "path,label\na,b\nc,\n": "3 label",
    "path,label\na,b\nc,b\n./a,d\n": "2 4 a",
    "path,label,label\na,b,c\n": "label",
    "path,label\na,b\nc,d,e\n": "3",
    "path,label,split\na,b,train\nc,b,holdout\n": "3 holdout",
    "path,label,split\na,b,train\nc,b\n": "3 split",
    "path,label,split,group\na,b,train,1\nc,b,test,1\n": "3 1 train test",
    'path,label\na,"b\nc,d\ne",f\n': "more cells",
    'path,label\na,"b\nc,d\n': "labels.csv end of data",
    'path,label\na,"b\nc,d\n"\n': "line 4 label quotation",
    "path,label\nhttps://a.org/1.png,b\n": "line 2 https://a.org/1.png fetch",
    '{"images": [{"id": 1}]}\n': "labels.csv JSON",
    "path,label\na,b\nc,d\0\n": "line 3 NUL",
    f"path,label\na,{1001 * 'b'}\n": "line 2 label 1,000",
}

TRAINING = """
--data digit | digit digits flowers good.h5
--data photos | photos pack
--data plain.h5 | plain.h5 --images
--data good.h5 --batch-size 1 | 1 2 --batch-size
--data good.h5 --batch-size 8 --batch-per-rank 2 | --batch-size --batch-per-rank
--data good.h5 --shards 1 | 2 1 shard:
--data good.h5 --shards 1000000000000 | 1,000,000,000,000 shards --batch-size
--data good.h5 --worker-load 3,1,1 | --worker-load 3 2
--data good.h5 --model resnet17 | --model resnet17 resnet18
--data good.h5 --model absent:net | --model absent:net
--data good.h5 --model tests.support.nets:absent | --model tests.support.nets absent
--data good.h5 --model tests/support/nets.py:OneLayer | --model tests.support.nets:OneLayer
--data good.h5 --model tests.support.nets.OneLayer | --model tests.support.nets.OneLayer
--data good.h5 --model a:b:c | --model a:b:c
--data good.h5 --model timm:no_such_network | --model timm:no_such_network
--data good.h5 --model timm:test_resnet(num_classes=3) | hpctrain gives num_classes
--data good.h5 --model timm:test_resnet(pretrained=True) | pretrained is refused
--data good.h5 --model smp:Unet(encoder_name=a/b) | 'encoder_name=a/b' b
--data good.h5 --augment kornia:RandomAfine() | --augment kornia:RandomAfine() 'RandomAffine'
--data good.h5 --augment kornia:RandomAffine( | --augment kornia:RandomAffine( argument=value
--data good.h5 --loss kornia:RandomAffine() | --loss no parts of kornia torch:
--data good.h5 --metric torchmetrics:ROC | --metric torchmetrics:ROC refused
--data good.h5 --optimizer timm:lamb | --optimizer timm:lamb needs --lr
--data good.h5 --optimizer adma | --optimizer adma 'adam'
--data good.h5 --model tests.support.nets:Remembering | Remembering
--data good.h5 --model broken_network:without | without parameters
--data good.h5 --model broken_network:nothing | nothing NoneType
--data good.h5 --model broken_network:number | number
--data good.h5 --small-stem | --small-stem digits
--data good.h5 --init missing.pth | missing.pth
--data good.h5 --init notes.txt | notes.txt
--data three.h5 --init nan.pt | nan.pt fc.bias
--data good.h5 --init begun | begun
--data good.h5 --freeze x* | --freeze x*
--data good.h5 --freeze * | --freeze all
--data good.h5 --lr-factors blocks=0.1 | --lr-factors blocks
--data good.h5 --no-decay embed --weight-decay 0.1 | --no-decay embed
--data good.h5 --class-weights 1,2 | --class-weights 2 10
--data three.h5 --task multilabel | multilabel three.h5 classify
--data three.h5 --task regress | regress three.h5 classify
--data labels.h5 | classify labels.h5 multilabel
--data labels.h5 --task regress | regress labels.h5 multilabel
--data sizes.h5 | classify sizes.h5 regress
--data sizes.h5 --task multilabel | multilabel sizes.h5 regress
--data alike.h5 --task regress | alike.h5 width deviation 7
--data labels.h5 --task multilabel --class-weights 1,2 | --class-weights 1,2 3
--data sizes.h5 --task regress --loss tests.support.own_functions:per_class | '(32, 2)' '(32,)'
--data sizes.h5 --task regress --loss tests.support.own_functions:squares | squares NaN unknown
--data good.h5 --shift 28 | --shift 28 27
--data good.h5 --shift -1 | --shift -1
--data wide.h5 --rotate90 | --rotate90 wide.h5 square 9x8
--data good.h5 --normalize imagenet | --normalize 3 1 --channels
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
"""
CONTINUED = """
--lr 0.5 | done --lr 0.5
--model resnet18 | done --model resnet18
--shards 5 | done --shards 5
--epochs 3 --data like_three.h5 | begun pack
--batch-size 7 | done --batch-size 7
--seed 1 | done --seed 1
--class-weights balanced | done --class-weights
--freeze conv1 | done --freeze
--clip-norm 1 | done --clip-norm
--final ema --ema 0.9 | done --ema
--run begun --epochs 1 | begun --epochs 1 2
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
--images g | g
--images x/y | x/y
--images '{split}/x' | {split}/x
--labels short | short 41 61
--labels names | names 60
--labels halves | halves
--labels linked | linked
--layout NHW | NHW
--images flat | flat reshape
--images turned | turned NCHW --layout
--images unwritten | unwritten
--images half | half 60
--images elsewhere | elsewhere
--split 0.999,0.001 | --split test
--stage . | --stage
"""
RESULTS = """
evaluate | run
evaluate nothing
evaluate begun
evaluate swept --trust-code | swept --best
evaluate done --split validation | validation train test
evaluate done --data tiny.h5 | tiny.h5 28 done
evaluate done --device cuda | --device cuda
evaluate done --loss tests.support.own_functions:mean | --loss tests.support.own_functions:mean
evaluate done --metric absent:metric | --metric absent:metric
evaluate shape.safetensors
evaluate classes.safetensors
evaluate plain.h5
predict done missing.png | missing.png
"""
BROKEN_NETWORK = """
from torch import nn

def without(image_shape, classes): return nn.Flatten()
def nothing(image_shape, classes): pass
number = 3
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with right files and wrong ones."""
    place = tmp_path_factory.mktemp("place")
    make_packs(place)
    class_folders(place / "photos", {"a": 10, "b": 10}, width=9, height=9, channels=1)
    (place / "bad").mkdir()
    for name, text in TOML.items():
        (place / f"bad/{name}.toml").write_bytes(text.encode(errors="surrogateescape"))
    make_arrays(place / "arrays.h5")
    texts = {
        "notes.txt": "no data",
        "two.toml": f"[base]\ndata = '{place}/good.h5'\n[grid]\nseed = [1, 2]\n",
        "broken_network.py": BROKEN_NETWORK,
        "text.h5": "not an HDF5",
    }
    for name, text in texts.items():
        (place / name).write_text(text)
    make_runs(place)
    make_weights(place)
    return place


def make_packs(place):
    make_pack(place / "good.h5", {"train": 101, "test": 11})
    make_pack(place / "three.h5", {"train": 61, "test": 13}, classes=3)
    make_pack(place / "like_three.h5", {"train": 61, "test": 13}, classes=3, seed=1)
    make_pack(place / "tiny.h5", {"train": 61, "test": 13}, shape=(4, 4, 1), classes=3)
    images, present, values = draw_entries(np.random.default_rng(0), 61, (28, 28, 1))
    hp.write_pack(place / "labels.h5", {"train": (images, present)}, ["a", "b", "c"])
    hp.write_pack(place / "sizes.h5", {"train": (images, values)}, columns=["width", "height"])
    values[:, 0] = np.where(np.isnan(values[:, 0]), np.nan, 7)
    hp.write_pack(place / "alike.h5", {"train": (images, values)}, columns=["width", "height"])
    with h5py.File(place / "plain.h5", "w") as file:
        file["x"] = np.zeros((5, 4, 4, 1), np.uint8)
    gray = np.full((61, 28, 28, 1), 7, np.uint8), np.arange(61) % 3
    wide = np.zeros((61, 8, 9, 1), np.uint8), np.arange(61) % 3
    hp.write_pack(place / "wide.h5", {"train": wide}, ("a", "b", "c"))
    hp.write_pack(place / "flat.h5", {"train": gray, "test": gray}, ("a", "b", "c"))


def make_arrays(path):
    """An HDF5 file as other people make them, with wrong datasets beside the right ones."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (61, 8, 8, 3), np.uint8)
    labels = rng.integers(0, 3, 61)
    wrong = {
        "short": labels[:41],
        "names": np.array([b"cat"] * 60 + [b""]),
        "halves": labels / 2,
        "flat": images.reshape(61, -1),
        "turned": images.transpose(0, 3, 1, 2),
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
    begun = shutil.copytree(place / "runs/done", place / "runs/begun")
    (begun / "model.safetensors").unlink()
    lines = (begun / "progress.jsonl").read_text().splitlines(keepends=True)
    (begun / "progress.jsonl").write_text("".join(x for x in lines if '"kind": "end"' not in x))
    ended = ranks.alone("sweep", place / "two.toml", "--prepare", "--run", "swept", *runs)
    assert ended.code == 0, ended.err


#: Weights with other metadata.
CHANGED = {
    "shape.safetensors": {"image_shape": [28, 28]},
    "classes.safetensors": {"classes": 5},
}


def make_weights(place):
    whole = place / "runs/done/model.safetensors"
    tensors = safetensors.torch.load_file(whole)
    with safetensors.safe_open(whole, "pt") as file:
        metadata = json.loads(file.metadata()["hpctrain"])
    for name, change in CHANGED.items():
        text = json.dumps({**metadata, **change})
        safetensors.torch.save_file(tensors, place / name, {"hpctrain": text})
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


@pytest.mark.parametrize(("words", "names"), [*rows(SETTINGS), *rows(FILES)])
def test_a_wrong_setting_is_named(refused, words, names):
    if words[0].startswith("-"):  # nothing is trained if it is accepted
        words = ["--data", "nowhere.h5", *words]
    refused(0, words, names)


@pytest.mark.parametrize(
    ("flag", "value"), [(flag, value) for value in BOUNDS for flag in BOUNDS[value].split()]
)
def test_a_value_out_of_bounds_is_named(refused, flag, value):
    refused(0, ["--data", "nowhere.h5", flag, value], [flag, value])


@pytest.mark.parametrize("text", SWEEPS)
def test_a_wrong_sweep_is_named(place, refused, text):
    (place / "sweep.toml").write_text(text)
    refused(0, ["sweep", "sweep.toml"], SWEEPS[text].split())


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
