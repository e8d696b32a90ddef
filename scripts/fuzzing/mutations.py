"""Ways to corrupt a file: its bytes, or values in JSON, TOML and safetensors."""

from __future__ import annotations

import copy
import json
import random
import struct
from pathlib import Path
from typing import Any

VALUES = (
    None,
    True,
    -1,
    0,
    3,
    2**31,
    2**63,
    -(2**63) - 1,
    10**400,
    1e308,
    float("nan"),
    float("inf"),
    -0.5,
    "",
    "x",
    "../../../etc/passwd",
    "\x1b[31m[/b]",
    "é" * 300,
    [],
    [[]],
    [1, "a", None],
    {},
    {"a": {"b": [1]}},
)
ODD_TOML = (
    "= 1",
    "a = [[[[",
    "a = " + "9" * 5_000,
    "[base]",
    "[[variant]]",
    "epochs = 1e400",
    "lr = nan",
    "lr = -inf",
    "seed = 0x" + "f" * 40,
    "model = 5",
    "data = 1979-05-27T07:32:00Z",
    "batch_size = 07:32:00",
    'run = "a\\u0000b"',
    "shards = true",
    '"" = 1',
    "a.b.c = 1",
    "\x00",
    'data = """',
    "epochs = []",
    "images = {}",
)


def mutate_bytes(data: bytearray, draw: random.Random, head: int = 4096) -> str:
    """Change `data` in place; return what was done.

    At least half of all positions are in the first `head` bytes.
    """
    size = len(data)
    if not size:
        data[:] = draw.randbytes(9)
        return "9 bytes where there were none"
    place = draw.randrange(min(size, head) if draw.random() < 0.5 else size)
    length = draw.choice((1, 2, 4, 8, 64, 1024))
    end = min(size, place + length)
    match draw.randrange(9):
        case 0 | 1:
            data[place] ^= 1 << draw.randrange(8)
            return f"bit of byte {place} flipped"
        case 2:
            data[place:end] = draw.randbytes(end - place)
            return f"{end - place} random bytes from {place} on"
        case 3:
            value = draw.choice((0, 255))
            data[place:end] = bytes([value]) * (end - place)
            return f"{end - place} bytes of {value} from {place} on"
        case 4:
            del data[place:]
            return f"cut to {place} bytes"
        case 5:
            part = data[place:end]
            to = draw.randrange(max(1, size - len(part)))
            data[to : to + len(part)] = part
            return f"{len(part)} bytes from {place} copied to {to}"
        case 6:
            other = draw.randrange(max(1, size - length))
            first, second = sorted((place, other))
            if second + length <= size and first + length <= second:
                one, two = data[first : first + length], data[second : second + length]
                data[first : first + length], data[second : second + length] = two, one
            return f"{length} bytes at {first} and {second} swapped"
        case 7:
            data += draw.choice((b"\0", b"\n", draw.randbytes(length)))
            return "more bytes at the end"
        case _:
            data[place:place] = draw.randbytes(length)
            return f"{length} bytes put in at {place}"


def mutate_value(value: Any, draw: random.Random) -> tuple[Any, str]:
    """Return a copy of a JSON value with one place changed, and what was done."""
    value = copy.deepcopy(value)
    holders = list(_holders(value, ""))
    if not holders:
        return draw.choice(VALUES), "another value"
    holder, path = draw.choice(holders)
    keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
    key = draw.choice(keys)
    where = f"{path}.{key}".lstrip(".")
    match draw.randrange(6):
        case 0:
            del holder[key]
            return value, f"{where} dropped"
        case 1:
            other = draw.choice(keys)
            holder[key], holder[other] = holder[other], holder[key]
            return value, f"{where} and {other} swapped"
        case 2 if isinstance(holder, dict):
            holder["surplus"] = draw.choice(VALUES)
            return value, f"{path}.surplus added"
        case 3 if isinstance(holder[key], int | float):
            holder[key] = draw.choice((-1, 1, 2, 1000)) * holder[key] + draw.choice((0, 1))
            return value, f"{where} becomes {str(holder[key])[:20]}"
        case _:
            new = draw.choice(VALUES)
            holder[key] = new
            return value, f"{where} becomes {str(new)[:20]!r}"


def mutate_json(data: bytes, draw: random.Random) -> tuple[bytes, str]:
    """Change a value of a JSON text or corrupt its bytes; return the text and what was done."""
    if draw.random() < 0.6:
        value, what = mutate_value(json.loads(data), draw)
        return json.dumps(value).encode(), what
    changed = bytearray(data)
    return changed, mutate_bytes(changed, draw)


def mutate_lines(data: bytes, draw: random.Random) -> tuple[bytes, str]:
    """Change, delete or swap JSON lines, or corrupt bytes; return the text and what was done."""
    lines = data.splitlines(keepends=True)
    number = draw.randrange(len(lines))
    match draw.randrange(6):
        case 0 | 1 | 2:
            value, what = mutate_value(json.loads(lines[number]), draw)
            lines[number] = json.dumps(value).encode() + b"\n"
        case 3:
            del lines[number]
            what = "gone"
        case 4:
            other = draw.randrange(len(lines))
            lines[number], lines[other] = lines[other], lines[number]
            what = f"swapped with {other + 1}"
        case _:
            changed = bytearray(data)
            return changed, mutate_bytes(changed, draw)
    return b"".join(lines), f"line {number + 1}: {what}"


def mutate_toml(data: bytes, draw: random.Random) -> tuple[bytes, str]:
    """Insert, change or delete a line of TOML, or corrupt bytes; return text and what was done."""
    lines = data.decode().splitlines()
    number = draw.randrange(len(lines))
    match draw.randrange(4):
        case 0:
            lines.insert(number, odd := draw.choice(ODD_TOML))
            what = f"line {number + 1} put in: {odd[:30]!r}"
        case 1:
            name = lines[number].partition("=")[0]
            lines[number] = f"{name}= {json.dumps(value := draw.choice(VALUES))}"
            what = f"line {number + 1}: {name}= {str(value)[:30]!r}"
        case 2:
            what = f"line {number + 1} is gone: {lines.pop(number)[:30]!r}"
        case _:
            changed = bytearray(data)
            return changed, mutate_bytes(changed, draw)
    return ("\n".join(lines) + "\n").encode(), what


def mutate_tensors(data: bytes, draw: random.Random) -> tuple[bytes, str]:
    """Change a value in the header or metadata of a safetensors file, or corrupt its bytes."""
    length = struct.unpack("<Q", data[:8])[0]
    header, tensors = json.loads(data[8 : 8 + length]), data[8 + length :]
    choice = draw.randrange(4)
    if choice == 0:
        header, what = mutate_value(header, draw)
    elif choice == 1 and (entries := header.get("__metadata__")):
        name = draw.choice(list(entries))
        try:
            inner, what = mutate_value(json.loads(entries[name]), draw)
            entries[name] = json.dumps(inner)
        except ValueError:  # no JSON
            entries[name], what = "x", f"{name} becomes x"
        what = f"metadata {what}"
    else:
        changed = bytearray(data)
        return changed, mutate_bytes(changed, draw, 8 + length)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + tensors, what


def _holders(value: Any, path: str) -> Any:
    """Yield the non-empty objects and arrays in a value, with their paths."""
    if isinstance(value, dict | list) and value:
        yield value, path
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _holders(item, f"{path}.{key}")


def mutate_file(path: Path, draw: random.Random, head: int) -> tuple[bytes, str]:
    """Return the content of a file, changed in a way that suits its type, and what was done."""
    data = path.read_bytes()
    mutate = {
        ".json": mutate_json,
        ".jsonl": mutate_lines,
        ".toml": mutate_toml,
        ".safetensors": mutate_tensors,
    }.get(path.suffix)
    if mutate and data:
        return mutate(data, draw)
    changed = bytearray(data)
    return changed, mutate_bytes(changed, draw, head)
