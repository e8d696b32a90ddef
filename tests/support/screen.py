"""Terminals: what one shows after some output, and programs that run on one."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Sequence

from tests.support.launch import environment

#: newline and carriage return, a sequence ESC [ arguments letter, text
PARTS = re.compile(r"(?s)([\r\n])|\x1b\[([?0-9;]*)([A-Za-z])|([^\r\n\x1b]+)")
SEQUENCE = re.compile(r"\x1b\[[?<>=0-9;]*[A-Za-z]|\x1b\][^\x07\x1b]*(\x07|\x1b\\)|\x1b.")


def screen(output: str) -> list[str]:
    """What a terminal shows after `output`: lines without trailing spaces.

    Knows newline, carriage return and the sequences ESC [ n A (up), 2K (erase line), m (colour)
    and ?25l, ?25h (cursor); refuses all others.
    """
    lines, row, column = [""], 0, 0
    for control, argument, letter, text in PARTS.findall(output):
        if text:
            lines[row] = lines[row][:column].ljust(column) + text + lines[row][column + len(text) :]
            column += len(text)
        elif control == "\r":
            column = 0
        elif control == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif letter == "A":
            row -= int(argument)
        elif letter == "K":
            assert argument == "2"
            lines[row] = ""
        else:
            assert letter == "m" or argument + letter in ("?25l", "?25h")
    return [line.rstrip() for line in lines if line.strip()]


def without_escapes(output: str) -> str:
    """The text of `output` alone."""
    return SEQUENCE.sub("", output)


def open_terminal(columns: int, rows: int = 24) -> tuple[int, int]:
    """A terminal: the descriptor of who sits there, and that of a program."""
    terminal, program = pty.openpty()
    fcntl.ioctl(program, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    return terminal, program


def on_terminal(command: Sequence[str], columns: int) -> str:
    """What a program prints whose output is a terminal of so many columns."""
    terminal, output = open_terminal(columns)
    try:
        subprocess.run(
            command, stdin=output, stdout=output, env=environment(), timeout=60, check=True
        )
        return os.read(terminal, 10**5).decode()
    finally:
        os.close(terminal)
        os.close(output)
