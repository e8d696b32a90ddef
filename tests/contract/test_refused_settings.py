"""Wrong settings are refused: on the command line, in its files, in the file of a sweep.

One row for each check and each bound: numbers of all options are parsed alike, and their choices,
which are in surface.json, are compared alike.
"""

from __future__ import annotations

import pytest

from tests.support.ranks import alone
from tests.support.refused import check_refused, listing, rows

SETTINGS = """
--epochs 0
--epochs 2.5
--epochs '' | --epochs
--batch-size 0
--batch-per-rank 0
--shards 0
--threads 0
--threads 100000
--keep-checkpoints 0
--patience -1
--step-epochs 0
--overlap -1
--overlap 65
--seed x
--seed 9223372036854775808
--lr fast
--lr 0
--lr nan
--lr inf
--momentum 1
--momentum -0.1
--weight-decay -1
--min-lr -1
--warmup-epochs -1
--ema 0 --final ema | --ema 0
--ema 1 --final ema | --ema 1
--clip-norm 0
--label-smoothing 1
--label-smoothing -0.1
--noise-level 0
--noise-level 1.5
--random-crop -0.1
--random-crop 1.5
--max-value 0 --images x --labels y | --max-value 0
--optimizer sgd | --optimizer sgd sgdm
--schedule cosin | --schedule cosin cosine
--validate-every 2
--validate-every 0.5epochs
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
--split 1/0,1 --images x --labels y | --split 1/0,1
--split 0,1 --images x --labels y | --split 0,1
--split 1.2,-0.2 --images x --labels y | --split 1.2,-0.2
--run '' | --run
--run .
--run ..
--run a/b
--worker-load 3,x
--worker-load 3,0
--worker-load inf,1
--class-weights 1,x
--class-weights 1,0
--class-weights nan,1
--lr-factors fc
--lr-factors fc=0
--lr-factors fc=nan
--lr-factors =1
--freeze a,,b
--no-decay a,,b --weight-decay 0.1 | --no-decay a,,b
--no-decay bias | --no-decay --weight-decay
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
--max-value 255 | --max-value --images
--images x --labels y --normalize pack | --normalize pack
--loss mine:f --label-smoothing 0.1 | --loss mine:f --label-smoothing
--balanced-sampling --class-weights balanced
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
evaluate a --hang-timeout soon | --hang-timeout soon
evaluate a --mistakes -1 | --mistakes -1
evaluate a --mistakes 1001 | --mistakes 1001
evaluate a --output '' | --output
evaluate a b | b
predict a --figure -1 | --figure -1
predict a --figure 1001 | --figure 1001
predict a --output '' | --output
export a --batch-size 0 | --batch-size 0
export a --output '' | --output
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
--config photos
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
--config bad/trust.toml | bad/trust.toml trust_code
--config bad/trust.toml --trust-code | bad/trust.toml trust_code
evaluate --config bad/trust.toml --trust-code | bad/trust.toml trust_code
--config bad/model.toml | bad/model.toml mine:net --trust-code
--config bad/loss.toml | bad/loss.toml mine:loss --trust-code
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
    "loss": 'loss = "mine:loss"\naugment = "mine:images"\n',
}

SWEEPS = {
    "": "grid variant",
    "[base]\nepochs = 3": "grid variant",
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
    "[grid]\nlr = [-1.0]": "01-lr=-1 --lr -1",
    "[grid]\nlr = [1]\n[base]\nepochs = 0": "--epochs 0",
    "[grid]\nlr = [1]\n[base]\ncheckpoint_every = 'often'": "--checkpoint-every often",
    "[grid]\nlr = [1]\n[base]\nrun = 'a'": "base run",
    "[grid]\nruns_dir = ['a']": "grid runs_dir",
    "[[variant]]\nresume = 'must'": "variant resume",
    "[[variant]]\nname = 3\nlr = 1": "name 3",
    "[[variant]]\nname='a'\nlr=1\n[[variant]]\nname='a'\nlr=2": "variant a",
    f"[grid]\nseed = {[*range(101)]}\nlr = {[n + 1 for n in range(100)]}": "10,100",
    "trust_code = true\n[grid]\nlr = [1]": "trust_code",
    "[base]\ntrust_code = true\n[grid]\nlr = [1]": "trust_code",
    "[base]\nmodel = 'mine:net'\n[grid]\nlr = [1]": "mine:net --trust-code",
    "[base]\ndata = 'away.h5'\n[grid]\nlr = [1]": "--data away.h5",
    "[base]\ndata = 'text.h5'\n[grid]\nlr = [1]": "text.h5",
    "[grid": "",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder of files with wrong settings."""
    folder = tmp_path_factory.mktemp("settings")
    (folder / "bad").mkdir()
    (folder / "photos").mkdir()
    for name, text in TOML.items():
        (folder / f"bad/{name}.toml").write_bytes(text.encode(errors="surrogateescape"))
    (folder / "text.h5").write_text("no HDF5")
    return folder


@pytest.mark.parametrize(("words", "names"), [*rows(SETTINGS), *rows(FILES)])
def test_a_wrong_setting_is_named(place, monkeypatch, words, names):
    monkeypatch.chdir(place)
    before = listing(place)
    if words[0].startswith("-"):  # nothing is trained if it is accepted
        words = ["--data", "nowhere.h5", *words]
    check_refused(alone(*words), names)
    assert listing(place) == before


@pytest.mark.parametrize("text", SWEEPS)
def test_a_wrong_sweep_is_named(place, monkeypatch, text):
    monkeypatch.chdir(place)
    (place / "sweep.toml").write_text(text)
    before = listing(place)
    check_refused(alone("sweep", "sweep.toml"), SWEEPS[text].split())
    assert listing(place) == before
