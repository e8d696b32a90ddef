"""Parts of other libraries, named by a setting as ``LIBRARY:Name(arguments)``.

A part is a class of another library, which ``kornia:RandomAffine(degrees=15)`` names: a transform,
a loss, a metric, an optimizer or a network. Its arguments are Python literals, which are parsed and
never evaluated; a bare word is a text (``padding_mode=reflection``).

A part may be named by a file without --trust-code, because only the names in ``parts.toml`` are
accepted: classes that were tried, which open no file and no connection, with the arguments that
they may be given. The table is read, and a library imported, only if a part is named.
"""

from __future__ import annotations

import enum
import functools
import importlib.metadata
import inspect
import math
import re
import tomllib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hpctrain.config.installed import import_installed, installed_only
from hpctrain.errors import MOST_SHOWN, UsageError, did_you_mean, one_line
from hpctrain.text import brief

if TYPE_CHECKING:
    import ast

#: Modules of each library in which the parts of a setting are.
MODULES: dict[str, dict[str, tuple[str, ...]]] = {
    "augment": {
        "kornia": ("kornia.augmentation", "kornia.augmentation.auto"),
        "torchvision": ("torchvision.transforms.v2",),
    },
    "loss": {"torch": ("torch.nn",)},
    "metric": {
        "torchmetrics": (
            "torchmetrics.classification",
            "torchmetrics.regression",
            "torchmetrics.segmentation",
        )
    },
    "optimizer": {"torch": ("torch.optim",), "timm": ("timm.optim",)},
    "model": {"timm": ("timm",), "smp": ("segmentation_models_pytorch",)},
}
#: Settings whose library names its parts itself, in a registry of which the table lists none.
REGISTRIES = {("model", "timm")}
#: The extra of hpctrain that installs a package.
EXTRAS = {
    "kornia": "augment",
    "torchvision": "augment",
    "torchmetrics": "metrics",
    "timm": "timm",
    "segmentation_models_pytorch": "smp",
}
EXAMPLES = {
    "augment": "kornia:RandomAffine(degrees=15)",
    "loss": "torch:HuberLoss(delta=0.5)",
    "metric": "torchmetrics:MulticlassAUROC()",
    "optimizer": "torch:NAdam(betas=(0.9, 0.99))",
    "model": "timm:convnext_atto(drop_path_rate=0.1)",
}
FILES = "a part reads no file and downloads nothing"
RANKS = "hpctrain combines the values of ranks itself"
UPDATE = "hpctrain says how the update is computed"
#: Patterns of arguments that no part is given, and why.
REFUSED_ARGUMENTS = {
    "pretrained*": f"{FILES}: published weights are a file for --init",
    "encoder_weights": f"{FILES}: published weights are a file for --init",
    "checkpoint_path": f"{FILES}: published weights are a file for --init",
    "cache_dir": FILES,
    "process_group": RANKS,
    "dist_*": RANKS,
    "distributed_*": RANKS,
    "sync_*": RANKS,
    "fused": UPDATE,
    "capturable": UPDATE,
    "foreach": UPDATE,
    "differentiable": UPDATE,
}
#: Those of networks alone: of a metric, `weights` may be the weighting of its entries.
REFUSED_OF_NETWORKS = {"weights": REFUSED_ARGUMENTS["pretrained*"]}
TABLE = Path(__file__).with_name("parts.toml")
LONGEST = 1000  # characters of a part
NAME = re.compile(r"(?P<name>[A-Za-z_]\w*(?:\.\w+)*)(?:\((?P<arguments>.*)\))?", re.ASCII)
PLAIN = (bool, int, float, str)
NO_WORDS = {"true": "True", "false": "False", "none": "None", "null": "None"}


class Part(NamedTuple):
    """A part of another library, as a setting names it."""

    setting: str  # "augment", "loss", "metric", "optimizer" or "model"
    text: str  # as it was given: "kornia:RandomAffine(degrees=15)"
    library: str
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def flag(self) -> str:
        """The setting with the text, with which every error about the part begins."""
        return f"--{self.setting} {self.text}"

    @property
    def package(self) -> str:
        """The library's package, "segmentation_models_pytorch" of "smp"."""
        return MODULES[self.setting][self.library][0].partition(".")[0]

    @property
    def direction(self) -> str:
        """The direction in which a metric is better, "max" or "min"; "" if it has none."""
        return accepted_names(self.setting, self.library).get(self.name, "")


class NamesOfLibrary(NamedTuple):
    """What the table says of the names of one library in one setting."""

    accepted: dict[str, str]  # and of a metric its direction, "max" or "min"
    refused: dict[str, str]  # and why


def is_part(setting: str, text: str) -> bool:
    """Whether the text of a setting names a part: whether it begins with a library of it."""
    library, colon, _ = text.partition(":")
    return bool(colon) and library in MODULES.get(setting, {})


def find_part(setting: str, text: str) -> Part:
    """Parse the text of a part, and look up its name in the table; nothing is imported.

    Raises UsageError for a text that is none, for a name that is unknown or refused, and for
    arguments that no part is given.
    """
    flag = f"--{setting} {brief(text, MOST_SHOWN)}"
    library, _, rest = text.partition(":")
    match = NAME.fullmatch(rest)
    has_dots = match and "." in match["name"] and (setting, library) not in REGISTRIES
    if match is None or has_dots or len(text) > LONGEST or not text.isprintable():
        raise UsageError(
            f"{flag}: write {library}:Name(argument=value, ...) in one line of at most"
            f" {LONGEST:,} characters, as in '{EXAMPLES[setting]}'"
        )
    try:
        args, kwargs = _parse_arguments(match["arguments"] or "")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        reason = getattr(error, "msg", None) or str(error) or type(error).__name__
        raise UsageError(
            f"{flag}: {reason}; arguments are numbers, texts, True, False, None, lists, tuples and"
            f" dicts, as in '{EXAMPLES[setting]}'"
        ) from None
    part = Part(setting, text, library, match["name"], args, kwargs)
    _check_name(part)
    for name in kwargs:
        _check_argument(part, name)
    for value in _texts_in([args, kwargs]):
        if re.search(r"[/:\\]", value):
            raise UsageError(f"{flag}: {value!r} could be a path or an address: {FILES}")
    return part


def refuse_other_library(setting: str, text: str) -> None:
    """Raise UsageError for a text like a part, with parentheses, of no library of this setting.

    A function of the user's own, ``package.module:function``, has none.
    """
    library, colon, rest = text.partition(":")
    if not colon or not rest.endswith(")") or is_part(setting, text):
        return
    libraries = ", ".join(f"{name}:" for name in MODULES[setting])
    raise UsageError(
        f"--{setting} {brief(text, MOST_SHOWN)}: no parts of {library} are known for it; there are"
        f" those of {libraries} as in '{EXAMPLES[setting]}'"
    )


def load_class(part: Part) -> Any:
    """Import the class, or function, that a part names.

    Raises UsageError if its library is not installed, is no installed one, cannot be imported, or
    lacks the name in the installed version.
    """
    extra = EXTRAS.get(part.package, "")
    for name in MODULES[part.setting][part.library]:
        module = import_installed(name, part.flag, extra)
        if name == "timm.optim":
            return module.get_optimizer_class(part.name)
        if hasattr(module, part.name):
            return getattr(module, part.name)
    version = version_of(part.package)
    raise UsageError(
        f"{part.flag}: {part.package} {version}, the installed one, has no {part.name}"
    )


def parameters_of(part: Part) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of the class of a part by name. Raises UsageError as `load_class`."""
    return inspect.signature(load_class(part)).parameters


def taken_by(part: Part, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the arguments, which hpctrain would fill in, that the class takes."""
    parameters = parameters_of(part)
    return {name: value for name, value in arguments.items() if name in parameters}


def build_part(part: Part, **filled: Any) -> Any:
    """Call the class of a part with its arguments, and with those that hpctrain fills in.

    Raises UsageError for arguments that the class does not take, or refuses itself.
    """
    check_filled(part, part.kwargs, filled)
    kind = load_class(part)
    signature = inspect.signature(kind)
    try:
        kwargs = {**_with_choices(signature, part.kwargs), **filled}
        given = signature.bind_partial(*part.args, **part.kwargs).arguments
        for name in given:  # those without names, too
            _check_argument(part, name)
        check_filled(part, given, filled)
        signature.bind(*part.args, **kwargs)
        with installed_only():
            return kind(*part.args, **kwargs)
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        reason = brief(one_line(error).rstrip("."), MOST_SHOWN)
        raise UsageError(
            f"{part.flag}: {reason}; it is {describe(part.name, signature)}"
        ) from error


def check_filled(part: Part, given: Iterable[str], filled: Iterable[str]) -> None:
    """Raise UsageError if one of the given arguments, by name, is one that hpctrain fills in."""
    for name in given:
        if name in filled:
            raise UsageError(f"{part.flag}: hpctrain gives {name}: leave it out")


def describe(name: str, signature: inspect.Signature) -> str:
    """Return how a class is called, in one line: its arguments and their defaults."""
    texts = [
        str(parameter.replace(annotation=inspect.Parameter.empty)).replace(" = ", "=")
        for parameter in signature.parameters.values()
    ]
    return brief(f"{name}({', '.join(texts)})", MOST_SHOWN)


def accepted_names(setting: str, library: str) -> Mapping[str, str]:
    """Return the names of a library that a setting accepts; of metrics with their direction."""
    return read_table()[setting, library].accepted


@functools.cache
def read_table() -> dict[tuple[str, str], NamesOfLibrary]:
    """Return what ``parts.toml`` says, by setting and library."""
    tables = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    table = {}
    for setting, libraries in MODULES.items():
        for library in libraries:
            names = tables.get(setting, {}).get(library, {})
            table[setting, library] = NamesOfLibrary(
                names.get("accepted", {}), names.get("refused", {})
            )
    return table


def version_of(package: str) -> str:
    """Return the version of a package that is installed; it need not be imported yet."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of an unknown version"


def _check_name(part: Part) -> None:
    """Raise UsageError unless the table accepts the name of a part."""
    if (part.setting, part.library) in REGISTRIES:
        return
    names = read_table()[part.setting, part.library]
    if part.name in names.accepted:
        return
    if part.name in names.refused:
        raise UsageError(f"{part.flag}: {part.name} is refused: {names.refused[part.name]}")
    near = did_you_mean(part.name, names.accepted)
    if not near:
        near = f"; there are {brief(', '.join(names.accepted), MOST_SHOWN)}"
    raise UsageError(f"{part.flag}: hpctrain knows no {part.name} of {part.library}{near}")


def _check_argument(part: Part, name: str) -> None:
    """Raise UsageError for an argument that no part is given."""
    refused = REFUSED_ARGUMENTS
    if part.setting == "model":
        refused = {**REFUSED_ARGUMENTS, **REFUSED_OF_NETWORKS}
    for pattern, why in refused.items():
        if fnmatchcase(name, pattern):
            raise UsageError(f"{part.flag}: {name} is refused: {why}")


def _with_choices(signature: inspect.Signature, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments with texts made members of an enumeration, where the default is one.

    Raises ValueError for a text that names none.
    """
    result = dict(kwargs)
    for name, value in kwargs.items():
        default = getattr(signature.parameters.get(name), "default", None)
        if isinstance(default, enum.Enum) and isinstance(value, str):
            choices = {str(member.value): member for member in type(default)}
            if value not in choices:
                near = did_you_mean(value, choices) or f"; there are {', '.join(choices)}"
                raise ValueError(f"{name} cannot be {value!r}{near}")
            result[name] = choices[value]
    return result


def _parse_arguments(text: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Parse "0.5, degrees=15". Raises SyntaxError or ValueError."""
    import ast  # only if a part is named

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as for an unknown escape in a text
        call = ast.parse(f"_({text})", mode="eval").body
    is_call = isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
    if not is_call or not isinstance(call, ast.Call):
        raise ValueError("the parentheses do not match")
    args = tuple(_literal(node) for node in call.args)
    kwargs = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise ValueError("** is not for arguments of parts")
        if keyword.arg in kwargs:
            raise ValueError(f"{keyword.arg} is given twice")
        kwargs[keyword.arg] = _literal(keyword.value)
    return args, kwargs


def _literal(node: ast.expr) -> Any:
    """Return the value of a literal, and the text of a bare word. Raises ValueError for others."""
    import ast

    match node:
        case ast.Constant(value=float() as number) if math.isinf(number):
            raise ValueError("a number is larger than float64 can hold")
        case ast.Constant(value=bool() | int() | float() | str() | None):
            return node.value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float()) as number):
            return -_literal(number)
        case ast.Name(id=word) if word.lower() in NO_WORDS:
            raise ValueError(f"write {NO_WORDS[word.lower()]} in place of {word}")
        case ast.Name(id=word):
            return word
        case ast.Tuple(elts=elements):
            return tuple(map(_literal, elements))
        case ast.List(elts=elements):
            return list(map(_literal, elements))
        case ast.Dict(keys=keys, values=values) if None not in keys:
            names = [_literal(key) for key in keys if key is not None]
            if any(not isinstance(name, PLAIN) for name in names):
                raise ValueError("keys of a dict are numbers and texts")
            return dict(zip(names, map(_literal, values), strict=True))
    raise ValueError(f"{brief(ast.unparse(node), 60)} is no literal (quote texts, as in 'a-b')")


def _texts_in(value: Any) -> Iterator[str]:
    """Yield all texts in a value of literals."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.items():
            yield from _texts_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts_in(item)
