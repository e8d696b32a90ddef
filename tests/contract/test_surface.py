"""The surface: subcommands, options, their types and defaults, and the names of the Python API.

surface.json holds it. A change of the surface fails here; if it is meant, tell users in
CHANGELOG.md and write the file anew:

    python -m pytest tests/contract/test_surface.py --update
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys
from pathlib import Path

import pytest

import hpctrain as hp
from tests.support.launch import run
from tests.support.ranks import alone

FILE = Path(__file__).with_name("surface.json")
HEAVY = ("torch", "mpi4py", "h5py", "numpy", "PIL", "cupy", "matplotlib", "rich", "sysconfig")
SHOW_HELP = f"""
import contextlib, io, json, runpy, sys

def shown(*words):
    sys.argv = ["hpctrain", *words]
    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
        runpy.run_module("hpctrain", run_name="__main__")
    return text.getvalue()

overview = shown("--help")
names = [line.split()[0] for line in overview.splitlines() if line.startswith("  ")]
pages = {{name: shown(name, "--help") for name in names}}
print(json.dumps([overview, pages, sorted(set({HEAVY}) & set(sys.modules))]))
"""
RESULTS = ("Evaluation", "History", "Predictions", "TrainedNetwork", "TrainingResult")
#: A value of each type, for a TOML file.
VALUES = {"N": "1", "X": "0.5", "TEXT": '"1"', "switch": "true", "FILE": '"1"', "words": '"1"'}


@pytest.fixture(scope="module")
def help_pages():
    """The overview, the page of each subcommand, and which heavy modules were imported."""
    return json.loads(run([sys.executable, "-c", SHOW_HELP]).stdout)


def options(page):
    """What the page of a subcommand says of its options: {"--lr": "X", "--seed": "N = 0"}."""
    head = re.compile(
        r"^  (?:(--[a-z0-9-]+)(, --no-[a-z0-9-]+)?|([A-Z]+))(?: ({[^}]*}|[A-Z]+))?(?:  |$)"
    )
    found, name = {}, ""
    for line in page.splitlines():
        if match := head.match(line):
            flag, switch, word, kind = match.groups()
            name = flag or word
            found[name] = [kind or ("switch" if switch or name == "--trust-code" else "words")]
            line = line[match.end() :]
        elif not line.startswith("   "):  # the heading of a group
            name = ""
        if name:
            found[name].append(line.strip())
    described = {}
    for name, (kind, *texts) in found.items():
        default = re.search(r"\(default: ([^()]*)\)$", " ".join(texts).strip())
        described[name] = f"{kind} = {default[1]}" if default else kind
    return described


def describe(public):
    """The parameters of a function or class; of a class of results, its members."""
    if not inspect.isclass(public):
        return signature(public)
    if issubclass(public, Exception):
        return f"exit code {public.exit_code}"
    if public.__name__ not in RESULTS:
        return signature(public)
    fields = dataclasses.fields(public) if dataclasses.is_dataclass(public) else ()
    own = {*dir(public), *(field.name for field in fields)}
    return sorted(name for name in own - {*dir(dict), *dir(tuple)} if name[0] != "_")


def signature(public):
    """The parameters and their defaults, without types."""
    empty, found = inspect.Parameter.empty, []
    for parameter in inspect.signature(public).parameters.values():
        if type(parameter.default).__module__.startswith("hpctrain"):
            parameter = parameter.replace(default=...)
        found.append(parameter.replace(annotation=empty))
    return str(inspect.Signature(found))


def settings():
    """The settings of a run in Python: "float | None = None"."""
    fields = dataclasses.fields(hp.Config)
    return {field.name: f"{field.type} = {field.default!r}" for field in fields}


def test_the_surface_is_the_one_of_the_file(help_pages, request):
    _, pages, _ = help_pages
    python = {name: describe(getattr(hp, name)) for name in sorted(hp.__all__) if name != "Config"}
    found = {
        "commands": {name: options(page) for name, page in pages.items()},
        "python": {**python, "Config": settings()},
    }
    if request.config.getoption("update"):
        FILE.write_text(json.dumps(found, indent=1) + "\n")
    assert found == json.loads(FILE.read_text())


def test_help_imports_nothing_heavy(help_pages):
    assert help_pages[2] == []


def test_the_overview_names_every_subcommand_and_few_lines(help_pages):
    overview, pages, _ = help_pages
    assert len(pages) > 10 and "train" in pages
    assert len(overview.splitlines()) < 25 and "--lr" not in overview
    for name in pages:
        assert pages[name].startswith(f"usage: hpctrain {name}")


@pytest.mark.parametrize("columns", [80, 200])
def test_help_is_as_wide_as_the_terminal(columns):
    ended = alone("train", "--help", env={"COLUMNS": str(columns)})
    assert 0.9 * columns < max(map(len, ended.out.splitlines())) <= columns


def test_every_option_is_described(help_pages):
    for page in help_pages[1].values():
        for option in re.split(r"^  (?=\S)", page.partition("options:")[2], flags=re.MULTILINE)[1:]:
            assert len(option.split()) >= 3, option


def test_settings_of_python_are_the_options_of_train(help_pages):
    flags = set(options(help_pages[1]["train"])) - {"--config", "--trust-code"}
    assert flags == {"--" + name.replace("_", "-") for name in settings()}


def test_what_is_proposed_for_an_option_of_another_program_exists(help_pages):
    """And no name of ours is taken for another one."""
    flags = {command: set(options(page)) for command, page in help_pages[1].items()}
    for name, meant in hp.Config.elsewhere.items():
        command = re.match(r"hpctrain (\w+)", meant)
        of_command = flags[command[1] if command else "train"]
        assert set(re.findall(r"--[a-z0-9-]+", meant)) <= of_command, meant
        assert f"--{name.replace('_', '-')}" not in flags["train"], name


def test_options_are_keys_of_a_file(help_pages, tmp_path):
    """A file with all of them and one more is refused for that one."""
    path = tmp_path / "settings.toml"
    for command, page in help_pages[1].items():
        lines = []
        for name, kind in options(page).items():
            kind = kind.partition(" = ")[0]
            value = f'"{kind[1:-1].split(",")[0]}"' if kind[0] == "{" else VALUES[kind]
            if name not in ("--config", "--trust-code"):
                lines.append(f"{name.strip('-').lower().replace('-', '_')} = {value}\n")
        path.write_text("".join([*lines, "something_else = 1\n"]))
        ended = alone(command, "--config", path)
        assert ended.code == 2 and "something_else" in ended.err, ended.err
