"""The rules of the house, read from the source: who imports what, sizes, docstrings."""

import ast
import re
import sys
from collections import Counter
from fnmatch import fnmatch

import hpctrain
from tests.support.launch import ROOT, run

TREES = {p.relative_to(ROOT): ast.parse(p.read_text()) for p in ROOT.glob("hpctrain/**/*.py")}
MODULES = {".".join(p.with_suffix("").parts).removesuffix(".__init__"): p for p in TREES}
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
# From the bottom up. A module imports from its own floor and from those below it, but on the
# floor of the rooms (the third) from its own room only.
FLOORS = (
    "hpctrain errors text console typed config* files fault heartbeats launcher scheduler"
    " streams watchdog data.partition parallel.placement",
    "plan plan_check plan_text",
    "data* parallel* models* report*",
    "training* inference*",
    "*",
)
ONLY_IN = {
    "mpi4py": "parallel.mpi",
    "cupy": "parallel.memory",
    "h5py": "data.pack* data.hdf5* data.external_file",
}


def allowed(module, imported):
    def is_in(name, patterns):
        return any(fnmatch(name.removeprefix("hpctrain."), p) for p in patterns.split())

    if imported.split(".")[0] != "hpctrain":
        return is_in(module, ONLY_IN.get(imported.split(".")[0], "*"))
    own, other = (next(i for i in range(5) if is_in(n, FLOORS[i])) for n in (module, imported))
    return other < own or (
        other == own and (own != 2 or module.split(".")[1] in imported.split("."))
    )


def imports(tree):
    """Names of the modules that a file imports, also inside functions, types alone left out."""
    guards = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n)]
    for_types = {id(inner) for guard in guards for inner in ast.walk(guard)}
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from [name for name in inner if name in MODULES] or [node.module]


def test_imports_point_one_way():
    pairs = [(m, name) for m, path in MODULES.items() for name in imports(TREES[path])]
    assert [f"{m} imports {name}" for m, name in pairs if not allowed(m, name)] == []
    assert not allowed("hpctrain.data.loader", "hpctrain.models.resnet")
    assert not allowed("hpctrain.report.record", "hpctrain.training.step")
    assert not allowed("hpctrain.training.train", "mpi4py")


def test_functions_fit_on_a_screen():
    long = []
    for path, tree in TREES.items():
        functions = [node for node in ast.walk(tree) if isinstance(node, FUNCTION)]
        long += [f"{path}: {f.name}" for f in functions if f.end_lineno - f.lineno >= 60]
    assert long == []


def test_streams_and_events_of_a_gpu_are_made_and_waited_for_in_one_file():
    """hpctrain/streams.py: there a thread that waits sleeps. NCCL gets the number of one."""
    found = [
        f"{path}: {name}"
        for path in TREES
        if path.name != "streams.py"
        for name in re.findall(
            r"cuda\.(?:(?:[Ss]tream|Event|synchronize)\b|current_stream\(\w*\)(?!\.cuda_stream))",
            (ROOT / path).read_text(),
        )
    ]
    assert found == []


def test_the_first_line_of_an_error_is_taken_in_one_place():
    """errors.first_line: an error may have no text, or bars around it."""
    own = re.compile(r"str\((?:error|cause)\b.*\)\.(?:splitlines|partition|split\(.\\n)")
    found = [str(path) for path in TREES if own.search((ROOT / path).read_text())]
    assert found == ["hpctrain/errors.py"]


def test_a_rank_that_waits_for_others_tells_the_watchdog():
    """Else it is named among those that did not arrive."""
    silent = [
        str(path)
        for path in TREES
        if {"training", "inference"} & set(path.parts)
        and re.search(r"\b(comm|host)\.(allgather|bcast)\(", (ROOT / path).read_text())
    ]
    assert silent == []


def test_public_names_have_docstrings_and_nothing_is_left_to_do():
    bare = [str(path) for path, tree in TREES.items() if not ast.get_docstring(tree)]
    for path, tree in TREES.items():
        named = [node for node in tree.body if isinstance(node, (*FUNCTION, ast.ClassDef))]
        public = [node for node in named if not node.name.startswith("_")]
        bare += [f"{path}: {node.name}" for node in public if not ast.get_docstring(node)]
    marks = [str(p) for p in TREES if re.search("TODO|FIXME", (ROOT / p).read_text())]
    assert (bare, marks) == ([], [])


def test_no_two_public_classes_share_a_name():
    classes = [
        node.name for tree in TREES.values() for node in tree.body if isinstance(node, ast.ClassDef)
    ]
    counts = Counter(name for name in classes if not name.startswith("_"))
    assert [name for name, count in counts.items() if count > 1] == []


def test_importing_starts_nothing():
    heavy = {"torch", "mpi4py", "h5py", "numpy", "cupy"}
    code = f"import sys, hpctrain.cli, hpctrain.doctor.findings; print({heavy} & set(sys.modules))"
    done = run([sys.executable, "-c", code])
    assert (done.stdout, done.stderr) == ("set()\n", "")


def test_the_public_names_are_listed_without_starting_anything():
    code = "import sys, hpctrain as h; print({*h.__all__} - {*dir(h)}, '__version__' in dir(h),"
    code += " 'torch' in sys.modules)"
    assert run([sys.executable, "-c", code]).stdout == "set() True False\n"
    named = set(hpctrain.__all__)
    assert named == set(hpctrain._HOME) == {n for n in named if getattr(hpctrain, n)}
