"""What HDF5 says of a file that it cannot open, in words for its user."""

from __future__ import annotations

import re

NO_HDF5 = "is no HDF5 file"


def cause(error: Exception, remedy: str) -> str:
    """What happened to the file, and the `remedy` where there is one: "is cut short: ..."."""
    text = str(error)
    if "file signature not found" in text:
        return NO_HDF5
    lengths = re.search(r"truncated file: eof = (\d+).*stored_eof = (\d+)", text)
    if lengths:
        there, meant = (int(length) for length in lengths.groups())
        return f"is cut short: it has {there:,} of {meant:,} bytes; {remedy}"
    if "already open for write" in text or "bad object header version" in text:
        return f"was not written to its end (or is still being written); {remedy}"
    inner = re.search(r"\((.*)\)", text)
    reason = (inner.group(1) if inner else text).strip().split("\n")[0]
    return f"is damaged: {reason or 'HDF5 cannot read it'}; {remedy}"
