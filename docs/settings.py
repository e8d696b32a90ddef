"""Print docs/settings.md: the options of all subcommands, from the dataclasses of hpctrain/config.

python docs/settings.py > docs/settings.md
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from hpctrain.cli import COMMANDS
from hpctrain.config.option import TRUST_CODE, Settings, flag_of
from hpctrain.config.values import Value

HEAD = """# Settings

<!-- Made from hpctrain/config by: python docs/settings.py > docs/settings.md -->
The options of all subcommands. Each is also a key of a TOML file for `--config FILE`, such as
`batch_size = 64` for `--batch-size 64`; options given as flags win. Those that are on or off are
switches, such as `--verify` and `--no-verify`. An empty default is none, or decided by the plan,
which `--dry-run` prints. "Not with" names options that exclude each other.
"""
COLUMNS = "|Option|Default|Meaning|Values|\n|---|---|---|---|\n"
KINDS = {int: "integer", float: "number"}
COMMAND_LINE = "on the command line only"


def values(field: dataclasses.Field, meaning: str, settings: type[Settings]) -> Iterator[str]:
    """Yield the limits of an option, without those that its meaning states."""
    kind, choices = settings.types[field.name]
    if any(str(choice) not in meaning for choice in choices):
        yield ", ".join(map(str, choices))
    shown = "such as" in meaning or "as in" in meaning or field.default is not None
    if issubclass(kind, Value) and not shown:
        yield kind.advice
    if isinstance(check := field.metadata["check"], str) and check:
        least, most = check[1:-1].split(", ")
        sign = "≥" if check[0] == "[" else ">"
        yield f"{KINDS[kind]} " + (f"{sign} {least}" if most == "inf" else f"in {check}")
    elif not choices and kind in KINDS:
        yield KINDS[kind]
    if needs := field.metadata["needs"]:
        yield f"needs `{needs}`"
    for first, other, _ in settings.exclude:
        for one, another in ((first, other), (other, first)):
            flag, _, value = one.partition(" ")
            if flag == flag_of(field.name):
                yield f"{f'`{value}` ' if value else ''}not with `{another}`"
    if field.name == "trust_code":
        yield COMMAND_LINE


def name_of(field: dataclasses.Field) -> str:
    """What the command line calls an option."""
    return f"`{field.name.upper() if field.metadata['positional'] else flag_of(field.name)}`"


def row(field: dataclasses.Field, settings: type[Settings]) -> str:
    """The line of an option: name, default, meaning, values."""
    meaning, _, default = field.metadata["help"].partition("default: ")
    meaning = meaning.rstrip("; ")
    if field.metadata["required"]:
        default = "required"
    elif isinstance(field.default, bool):
        meaning, default = field.metadata["help"], "on" if field.default else "off"
    elif field.default not in (None, ()):
        default = str(field.default)
    cells = [name_of(field), default, meaning, "; ".join(values(field, meaning, settings))]
    cells[2] = meaning.replace("*", r"\*")
    return f"|{'|'.join(cells)}|\n"


def page() -> str:
    """The text of docs/settings.md. A line that an earlier table has is not repeated."""
    text, seen = HEAD, set()
    for name, command in COMMANDS.items():
        heading, table, known = "", "", []
        for field in command.settings.options():
            line = row(field, command.settings)
            heading = field.metadata["group"] or heading
            if line in seen:
                known.append(name_of(field))
                continue
            if heading:
                table += f"|**{heading}**||||\n"
            table, heading = table + line, ""
            seen.add(line)
        if command.settings.trust_flag:
            trust = f"|`--trust-code`|off|{TRUST_CODE}|{COMMAND_LINE}|\n"
            table += trust
            seen.add(trust)
        text += f"\n## {name}\n\n{command.summary[0].upper()}{command.summary[1:]}."
        text += f" As above: {', '.join(known)}.\n" if known else "\n"
        text += f"\n{COLUMNS}{table}" if table else ""
    return text


if __name__ == "__main__":
    print(page(), end="")
