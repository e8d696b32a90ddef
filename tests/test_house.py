"""The rules of the house: importing is light, what pages refer to exists, how tests are made."""

import importlib.machinery
import importlib.util
import json
import re
import sys

import hpctrain
from tests.support.circles import circles
from tests.support.density import Density, texts
from tests.support.launch import ROOT, run
from tests.support.names import all_names

DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
PAGES += DOCS
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
#: Flags of mpirun, Slurm and others that pages name.
OTHERS = """
    --array --exact --gpus --gpus-per-node --gpus-per-task --help --hostfile --logdir --map-by
    --no-kill --open-mode --requeue --signal --time --update
"""
PATH = re.compile(r"(?<![\w./-])(?:[a-z][\w.-]*/)*(?:[a-z]\w*\.py\b|(?<=/)(?![\w.-]))")
#: How dense the package is, at most (tests/support/density.py).
DENSITY = {
    "statements a line": 0.92,
    "packed assignments per 1,000 lines": 15,
    "conditional expressions per 1,000 lines": 28,
    "functions that store found": 15,
    "functions that store own": 15,
    "functions that store known": 15,
    "functions that store each": 15,
    "branches of a function": 25,
}
#: Names of the package's inside that tests know, and test files that sleep: at most.
MOST_NAMES, MOST_SLEEPERS = 150, 7


def test_importing_starts_nothing():
    heavy = {"torch", "mpi4py", "h5py", "numpy", "cupy"}
    code = "import sys, hpctrain as h; print({*h.__all__} - {*dir(h)}, '__version__' in dir(h),"
    code += f" {heavy} & set(sys.modules))"
    done = run([sys.executable, "-c", code])
    assert (done.stdout, done.stderr) == ("set() True set()\n", "")
    assert all(getattr(hpctrain, name) for name in hpctrain.__all__)


def test_no_imports_go_in_a_circle(tmp_path):
    """Those in functions and under TYPE_CHECKING included."""
    assert circles() == []
    texts = {
        "a": "from hpctrain import b",
        "b": "def f():\n    from hpctrain.c import x",
        "c": "import hpctrain.a",
        "d": "import hpctrain.a",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    files = {f"hpctrain.{name}": tmp_path / name for name in texts}
    assert circles(files) == [["hpctrain.a", "hpctrain.b", "hpctrain.c"]]


def test_a_line_holds_one_thing_and_names_say_what():
    denser = {
        name: value
        for name, value in Density(*texts().values()).figures().items()
        if value > DENSITY[name]
    }
    assert denser == {}
    assert len(texts()) > 80


def test_what_the_density_counts():
    function = '''
def f(x):
    """One line.

    And more.
    """
    # a comment
    found, own = x, [each for each in x]
    a, b = x
    for known in found if a and b else own:
        known()
'''
    assert Density(function).figures() == {
        "statements a line": 6 / 4,
        "packed assignments per 1,000 lines": 250,
        "conditional expressions per 1,000 lines": 250,
        "functions that store found": 1,
        "functions that store own": 1,
        "functions that store known": 1,
        "functions that store each": 1,
        "branches of a function": 5,
    }


def test_the_page_of_settings_is_that_of_their_classes():
    made = run([sys.executable, "docs/settings.py"], cwd=ROOT)
    again = "python docs/settings.py > docs/settings.md"
    assert (ROOT / "docs/settings.md").read_text() == made.stdout, again
    made = run([sys.executable, "docs/parts.py", "--print"], cwd=ROOT)
    assert (ROOT / "docs/parts.md").read_text() == made.stdout, "python docs/parts.py"


def targets(page):
    """The files that a page's links lead to, and the headings that they name there."""
    for link in re.findall(r"\]\((?!http)([^)]+)\)", page.read_text()):
        path, _, heading = link.partition("#")
        yield (page.parent / path).resolve() if path else page, heading


def headings(page):
    """Of a page, as links name them."""
    found = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", text).lower().replace(" ", "-") for text in found}


def test_links_lead_somewhere_and_every_page_is_linked():
    links = [(page.name, *target) for page in PAGES for target in targets(page)]
    assert [link for link in links if not link[1].exists()] == []
    assert [link for link in links if link[2] and link[2] not in headings(link[1])] == []
    linked = {path for name, path, _ in links if name == "README.md"}
    assert linked >= {*DOCS, *PAGES[:3]} - {PAGES[0]} and len(DOCS) > 5


def test_the_flags_that_pages_name_exist():
    surface = json.loads((ROOT / "tests/contract/surface.json").read_text())
    options = [option for of in surface["commands"].values() for option in of.items()]
    known = {flag for flag, _ in options}
    known |= {f"--no-{flag[2:]}" for flag, what in options if what == "switch = on"}
    scripts = [path for path in (ROOT / "scripts").rglob("*") if path.suffix in ("", ".py")]
    known |= {f for path in scripts if path.is_file() for f in FLAG.findall(path.read_text())}
    named = {(page.name, flag) for page in PAGES for flag in FLAG.findall(page.read_text())}
    assert {pair for pair in named if pair[1] not in known | {*OTHERS.split()}} == set()
    assert len(named) > 80


def test_the_files_and_functions_that_the_architecture_names_exist():
    """As `file.py` and `file.py: name, name`; in the figures each file on a line of its own."""

    def find(path):
        places = [ROOT / path, ROOT / "hpctrain" / path]
        return next((place for place in places if place.exists()), None)

    def defines(path, name):
        line = rf"^( *(def|class) {name}\b|{name}( =|: )|    {name}: )"
        return re.search(line, find(path).read_text(), re.MULTILINE)

    page = (ROOT / "docs/architecture.md").read_text()
    tree = (ROOT / "README.md").read_text().partition("## How it is built")[2]
    figures = [path.read_text() for path in (ROOT / "docs").glob("*.svg")]
    paths = {path for text in (tree, page, *figures) for path in PATH.findall(text)}
    assert [path for path in paths if not find(path)] == [] and len(paths) > 40
    named = re.findall(r"`([\w/]+\.py): ([\w., ]+)`", page)
    pairs = {(path, name) for path, names in named for name in re.split(", |[.]", names)}
    assert [pair for pair in pairs if not defines(*pair)] == [] and len(pairs) > 20


def test_tests_know_few_names_of_the_inside():
    """The fewer they know, the more can move without a change of tests (tests/support/api.py)."""
    found = set().union(*all_names().values())
    assert len(found) <= MOST_NAMES, sorted(found)


def test_tests_wait_for_what_must_happen():
    """With tests/support/wait.py; few sleep, most of these in programs that they start."""
    slept, helpers = re.compile(r"\btime\.sleep\("), ("tests/support/", "tests/gpu/emulator/")
    files = {str(path.relative_to(ROOT)): path for path in (ROOT / "tests").rglob("*.py")}
    files = {name: path for name, path in files.items() if not name.startswith(helpers)}
    found = [name for name, path in files.items() if slept.search(path.read_text())]
    assert len(found) <= MOST_SLEEPERS, found


def test_each_mutant_changes_lines_that_occur_once():
    """Otherwise scripts/mutants would not change what its table says."""
    loader = importlib.machinery.SourceFileLoader("mutants", str(ROOT / "scripts" / "mutants"))
    spec = importlib.util.spec_from_loader("mutants", loader)
    mutants = importlib.util.module_from_spec(spec)
    sys.modules["mutants"] = mutants
    loader.exec_module(mutants)
    table = mutants.read_table(mutants.TABLE.read_text())
    times = {m.name: (ROOT / m.path).read_text().count(m.old) for m in table}
    assert {name: count for name, count in times.items() if count != 1} == {}
    assert len(times) > 50
