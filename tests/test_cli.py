"""The command line: one line for a mistake, the right exit code, help without MPI."""

from __future__ import annotations

import dataclasses
import re
import sys

import pytest

from hpctrain import cli
from hpctrain.config import Config, to_toml
from hpctrain.errors import UsageError
from tests.support.launch import Job, run, run_cli, run_mpi
from tests.support.packs import make_pack


def test_bare_arguments_are_train_and_defaults_are_the_dataclass():
    assert cli.parse([]) == ("train", Config())
    assert cli.parse(["--lr", "0.5", "--flip"]) == ("train", Config(lr=0.5, flip=True))
    assert cli.parse(["train", "--no-channels-last"]) == ("train", Config(channels_last=False))


def test_positionals_and_tuples():
    name, settings = cli.parse(["predict", "run", "a.png", "b.png", "--output", "-"])
    assert (name, settings.run, settings.output) == ("predict", "run", "-")
    assert tuple(settings.images) == ("a.png", "b.png")


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path):
    (tmp_path / "run.toml").write_text('lr = 0.5\nbatch_size = 64\nmodel = "resnet18"\n')
    _, settings = cli.parse(["--config", str(tmp_path / "run.toml"), "--batch-size", "32"])
    assert settings == Config(lr=0.5, batch_size=32, model="resnet18")


def test_a_written_configuration_reads_back_the_same(tmp_path):
    config = Config(lr=0.25, shards=6, flip=True, run='odd "name"', init=None)
    (tmp_path / "config.toml").write_text(to_toml(config))
    assert cli.parse(["--config", str(tmp_path / "config.toml")])[1] == config


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bach-size", "3"], "unknown option '--bach-size', did you mean '--batch-size'"),
        (["--lr", "fast"], "--lr fast: expected a number"),
        (["--epochs", "2.5"], "--epochs 2.5: expected an integer"),
        (["--epochs", "1e400"], "--epochs 1e400: expected an integer"),
        (["--epochs=1e3", "--lr", "1"], "--epochs 1e3: expected an integer"),
        (
            ["--optimizer", "sgd"],
            "--optimizer sgd: there are sgdm, adam, adamw, did you mean 'sgdm'",
        ),
        (["--lr", "-1"], "--lr -1.0: give a number above 0"),
        (["sweep", "a.toml", "--slots", "0"], "--slots 0: give 1 or more"),
        (["--hang-timeout", "soon"], "--hang-timeout soon: give a time"),
        (["--freeze", "conv1", "bn1"], "commas: --freeze 'conv1,bn1'"),
        (["doctor", "mpi"], "unexpected argument 'mpi' for hpctrain doctor"),
        (["--flip=yes"], "--flip.*yes"),
        (["trian"], "no subcommand 'trian', did you mean 'train'"),
        (["validate"], "no subcommand 'validate', did you mean 'evaluate'"),
        (["cancel", "a"], "no subcommand 'cancel', did you mean 'stop'"),
        (["status"], "no subcommand 'status', did you mean 'watch'"),
        (["diff", "a", "b"], "no subcommand 'diff', did you mean 'compare'"),
        (["--learning-rate", "1"], "unknown option '--learning-rate', did you mean '--lr'"),
        (["--learning_rate=1"], "unknown option '--learning_rate', did you mean '--lr'"),
        (["--gpus", "4"], "unknown option '--gpus', did you mean 'mpirun -n N, one rank for each"),
        (["--accumulate", "4"], "unknown option '--accumulate', did you mean '--shards'"),
        (["--config", "nowhere.toml"], "nowhere.toml cannot be read: No such file"),
        (["pack", "a", "--sise", "3x3"], "'--sise', did you mean '--size'"),
        (["--lr"], "--lr.*expected"),
    ],
)
def test_a_mistake_is_one_line(arguments, message):
    with pytest.raises(UsageError, match=message) as caught:
        cli.parse(arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["bach_size = 3\n", "lr = 'fast'\n", "lr = \n"])
def test_a_mistake_in_the_file_is_one_line(tmp_path, text):
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(UsageError) as caught:
        cli.parse(["--config", str(tmp_path / "run.toml")])
    assert "\n" not in str(caught.value)
    if "bach" in text:
        assert "did you mean" in str(caught.value)


def test_a_worker_process_of_pack_imports_only_what_it_decodes_with():
    result = run_python(
        "import sys, hpctrain.data.packing.workers\n"
        "print(sorted({'torch', 'mpi4py', 'h5py', 'rich', 'hpctrain.config'} & set(sys.modules)))"
    )
    assert result.stdout == "[]\n"


@pytest.mark.parametrize("command", ["", *cli.COMMANDS])
def test_help_imports_nothing_heavy_and_lists_every_option(command):
    program = (
        "import sys\nfrom hpctrain.cli import main\n"
        f"try: main({[command, '--help'] if command else ['--help']!r})\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'mpi4py', 'numpy', 'h5py', 'cupy', 'PIL'} & set(sys.modules)\n"
        "print('heavy', sorted(heavy))"
    )
    result = run_python(program)
    assert "heavy []" in result.stdout
    listed = result.stdout.lower().replace("_", "-")
    if not command:
        assert all(f"\n  {name} " in listed for name in cli.COMMANDS)
        assert result.stdout.count("\n") < 20 and "--lr" not in listed
        return
    for field in dataclasses.fields(cli.COMMANDS[command].settings):
        word = "{" if field.metadata["positional"] and field.metadata["choices"] else field.name
        assert word.replace("_", "-") in listed
        first_word = field.metadata["help"].split()[0]
        assert first_word not in ("of", "a", "the", "default:", "how", "what", "where", "when")
    if command == "train":  # common ones first
        order = [listed.index(f"--{name} ") for name in ("data", "lr", "batch-size", "cache-dir")]
        assert order == sorted(order)


def run_python(program):
    from tests.support.launch import run

    return run([sys.executable, "-c", program])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    make_pack(folder / "good.h5", {"train": 101, "test": 11})
    data = (folder / "good.h5").read_bytes()
    (folder / "short.h5").write_bytes(data[:-1000])
    (folder / "foreign.h5").write_bytes(b"\xff\xd8\xff\xe0 not HDF5")
    make_pack(folder / "large.h5", {"train": 101}, shape=(4, 4, 1))
    return folder


TRAIN = ["-m", "hpctrain", "--progress", "none", "--threads", "1", "--epochs", "1"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--data", "missing.h5"], 2, r"missing\.h5"),
        (["--data", "short.h5"], 2, r"short\.h5.*"),
        (["--data", "foreign.h5"], 2, r"foreign\.h5.*"),
        (["--data", "good.h5", "--batch-size", "1"], 2, "mini-batches of 1,.*2 shards"),
        (["--data", "large.h5", "--model", "digits"], 2, "at least 5x5 pixels; these are 4x4"),
        (["--data", "good.h5", "--model", "tests.support.nets:too_few_outputs"], 2, "10 classes"),
        (["--data", "good.h5", "--model", "tests.support.nets:counting"], 2, "seen"),
        (["--data", "good.h5", "--batch-size", "16", "--lr", "1e30"], 1, "is not finite"),
    ],
)
def test_bad_input_on_two_ranks_is_one_line_and_no_traceback(folder, arguments, code, message):
    result = run_mpi(2, [*TRAIN, *arguments], cwd=folder)
    assert result.returncode == code, result.stderr
    ours = [line for line in result.stderr.splitlines() if line.startswith("hpctrain:")]
    assert len(ours) == 1
    assert re.search(message, ours[0])
    assert "Traceback" not in result.stderr + result.stdout


def test_a_run_that_exists_is_refused(folder):
    (folder / "runs/taken").mkdir(parents=True)
    result = run_cli([*TRAIN[2:], "--data", "good.h5", "--run", "taken"], cwd=folder)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert "taken exists" in result.stderr


@pytest.mark.parametrize("name", ["compare", "pack", "plot", "stop", "watch"])
def test_what_one_process_does_is_refused_among_several(monkeypatch, name):
    monkeypatch.setattr(cli, "launched_size", lambda: 1)
    words = [name, "a", "b"] if name == "compare" else [name]
    cli.parse(words)
    monkeypatch.setattr(cli, "launched_size", lambda: 3)
    with pytest.raises(UsageError, match=f"{name} needs one process, not 3: call it without mpi"):
        cli.parse(words)


@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_SIZE=1", "SLURM_STEP_NUM_TASKS=2"])
def test_what_starts_ranks_is_refused_under_a_launcher(monkeypatch, variable):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")  # an interactive step: srun --pty bash
    cli.parse(["sweep", "sweep.toml"])
    monkeypatch.setenv(*variable.split("="))
    with pytest.raises(UsageError, match="sweep starts its own ranks: call it without mpirun"):
        cli.parse(["sweep", "sweep.toml"])


def test_no_mpi_library_is_one_line_with_advice(folder):
    env = {"MPI4PY_MPIABI": "mpiabi", "MPI4PY_LIBMPI": "/nowhere/libmpi.so"}
    result = run_cli([*TRAIN[2:], "--data", "good.h5"], cwd=folder, env=env)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert "no MPI library" in result.stderr
    assert "openmpi" in result.stderr


@pytest.mark.parametrize(
    "names",
    [("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID")],
)
def test_processes_of_a_foreign_launcher_are_refused_once(folder, names):
    first = run_cli(["--data", "good.h5"], cwd=folder, env={names[0]: "4", names[1]: "0"})
    assert first.returncode == 2
    assert re.search("started 4 processes, but each sees only itself", first.stderr)
    other = run_cli(["--data", "good.h5"], cwd=folder, env={names[0]: "4", names[1]: "3"})
    assert (other.returncode, other.stderr) == (2, "")


BROKEN = """
from hpctrain.launcher import launched_rank
{at_import}
def main(settings):
    from hpctrain.parallel.mpi import start_mpi
    comm = start_mpi()
    {at_work}
    comm.Barrier()
    return 0
"""
FAIL = "if launched_rank() == 1: raise ValueError('broken here')"


@pytest.mark.parametrize("where", ["at_import", "at_work"])
def test_an_error_on_one_rank_ends_all_and_names_the_rank(tmp_path, where):
    lines = {"at_import": "", "at_work": "", where: FAIL}
    (tmp_path / "broken.py").write_text(BROKEN.format(**lines))
    program = (
        "import sys; from hpctrain.config import Config; from hpctrain.cli import start;"
        "sys.exit(start('train', 'broken', Config()))"
    )
    result = run_mpi(3, ["-c", program], cwd=tmp_path, timeout=30)
    assert result.returncode == 1
    assert re.search(r"\[rank 1 of 3 @\S+\].*ValueError: broken here", result.stderr)


@pytest.mark.parametrize("order", ["flag first", "file first", "="])
def test_flags_win_over_the_file_wherever_they_stand(tmp_path, order):
    path = tmp_path / "a.toml"
    path.write_text('epochs = 7\nlr = 0.5\nflip = true\nchannels_last = false\nrun = "x"\n')
    flags = ["--epochs", "3", "--no-flip"]
    words = {
        "flag first": [*flags, "--config", str(path)],
        "file first": ["--config", str(path), *flags],
        "=": [*flags, f"--config={path}"],
    }[order]
    _, settings = cli.parse(words)
    assert (settings.epochs, settings.lr, settings.flip) == (3, 0.5, False)
    assert (settings.channels_last, settings.run) == (False, "x")


def test_a_file_gives_values_as_the_command_line_does(tmp_path):
    path, other = tmp_path / "a.toml", tmp_path / "b.toml"
    path.write_text('lr = 1\nvalidate_every = 0\ntime_limit = 02:30:00\nepochs = "3"\n')
    other.write_text("epochs = 4\n")
    _, settings = cli.parse(["--config", str(path), "--config", str(other)])
    assert (settings.lr, type(settings.lr), settings.validate_every) == (1.0, float, "0")
    assert (settings.time_limit, settings.epochs) == ("02:30:00", 4)


def test_words_without_flags_stand_in_files_too(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text('run = "run"\nimages = ["a.png", "b.png"]\n')
    _, settings = cli.parse(["predict", "--config", str(path)])
    assert (settings.run, settings.images) == ("run", ("a.png", "b.png"))
    _, settings = cli.parse(["predict", "other", "--config", str(path)])
    assert settings.run == "other"


@pytest.mark.parametrize("setting", ["model", "loss", "augment", "metric"])
def test_a_function_that_a_file_names_needs_trust_code(tmp_path, setting):
    path = tmp_path / "config.toml"
    path.write_text(f'{setting} = "payload:net"\n')
    words = ["--config", str(path)]
    with pytest.raises(cli.UsageError, match=r"config\.toml names payload:net: .* --trust-code"):
        cli.parse(words)
    for own in (["--trust-code"], [f"--{setting}", "other:net"], [f"--{setting}=payload:net"]):
        assert ":net" in getattr(cli.parse([*words, *own])[1], setting)
    path.write_text('model = "resnet18"\n')
    assert cli.parse(words)[1].model == "resnet18"
    assert getattr(cli.parse([f"--{setting}", "payload:net"])[1], setting) == "payload:net"


@pytest.mark.parametrize("command", ["train", "evaluate", "predict", "export", "sweep"])
def test_no_file_can_grant_trust(tmp_path, command):
    path = tmp_path / "a.toml"
    path.write_text("trust_code = true\n")
    with pytest.raises(cli.UsageError, match=r"a\.toml: trust_code can be given on the command"):
        cli.parse([command, "--config", str(path), "--trust-code"])
    assert "trust_code" not in cli.config.to_toml(cli.config.Config())


def test_the_configuration_that_a_run_leaves_can_be_read_again(tmp_path):
    settings = cli.config.Config(lr=0.25, flip=True, run="a b", clip_norm=1e-3)
    path = tmp_path / "config.toml"
    path.write_text(cli.config.to_toml(settings))
    assert cli.parse(["--config", str(path)])[1] == settings


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"epochs = ", r"a\.toml is no TOML: Invalid value"),
        (b"epochs = 1\nepochs = 2\n", r"a\.toml is no TOML"),
        (b"\xb0\xff\x00", r"a\.toml is no text: byte 0 is not UTF-8"),
        (b"[train]\nepochs = 2\n", "unknown setting 'train': settings are top-level keys"),
        (b"epoch = 2\n", "unknown setting 'epoch', did you mean 'epochs'?"),
        (b'epochs = "three"\n', r"a\.toml: --epochs three: expected an integer"),
        (b"lr = [1, 2]\n", r"a\.toml: lr must be one value"),
        (b"flip = 'yes'\n", r"a\.toml: flip must be true or false, not yes"),
        (b"epochs = true\n", r"a\.toml: epochs must be an integer, not True"),
        (b"resume = 'perhaps'\n", "--resume perhaps: there are auto, never, must"),
    ],
)
def test_a_mistake_in_a_file_names_the_file(tmp_path, content, message):
    path = tmp_path / "a.toml"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        cli.parse(["--config", str(path)])
    with pytest.raises(UsageError, match="is a folder"):
        cli.parse(["--config", str(tmp_path)])


def test_a_mistake_on_the_command_line_is_said_once_by_all_ranks(folder):
    for words in (["--nonsense", "3"], ["evaluate", "--hang-timeout", "soon"], ["nonsense"]):
        done = run_mpi(3, ["-m", "hpctrain", *words], cwd=folder)
        ours = [line for line in done.stderr.splitlines() if "hpctrain:" in line]
        assert done.returncode == 2 and len(ours) == 1, done.stderr
        assert words[-1] in ours[0] or words[0].strip("-") in ours[0]


def test_a_mistake_of_one_rank_alone_names_it(folder):
    """A file that one host lacks: the others, which have read theirs, end too."""
    (folder / "half.toml").write_text("epochs = 1\n")
    program = (
        "import sys; from hpctrain.__main__ import program;"
        "from hpctrain.launcher import launched_rank;"
        "file = 'half.toml' if launched_rank() != 1 else 'gone.toml';"
        "sys.argv[1:] = ['--progress', 'none', '--config', file]; sys.exit(program())"
    )
    done = run_mpi(3, ["-c", program], cwd=folder)
    ours = [line for line in done.stderr.splitlines() if line.startswith("hpctrain:")]
    assert done.returncode == 2 and len(ours) == 1, done.stderr
    assert ours[0].startswith("hpctrain: rank 1: ")


@pytest.mark.parametrize("words", ["--help", "train --dry-run --progress none --data good.h5"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_ends_first_meets_no_traceback(folder, words, unbuffered):
    line = f"{sys.executable} -m hpctrain {words} | true; exit ${{PIPESTATUS[0]}}"
    done = run(["bash", "-c", line], cwd=folder, env={"PYTHONUNBUFFERED": unbuffered})
    assert (done.returncode in (0, 1), done.stderr) == (True, "")


def test_a_line_is_there_before_anything_slow_is_imported(folder):
    """torch that never ends being imported."""
    (folder / "torch.py").write_text("import time\ntime.sleep(1000)\n")
    job = Job([sys.executable, "-m", "hpctrain", "train", "--data", "good.h5"], cwd=folder)
    try:
        assert job.stderr and job.stderr.readline() == "hpctrain train: starting on 1 rank ...\n"
    finally:
        job.end()
        (folder / "torch.py").unlink()
