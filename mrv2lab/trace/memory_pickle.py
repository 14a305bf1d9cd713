"""Reads a pickle of numbers, texts, lists, dicts and flat tuples of numbers, and nothing else.

A pickle is a program. Before it runs, its instructions are checked against a list of those that can build such values:
none imports, calls or makes an instance of anything. It is run by an Unpickler that could not either.
"""

from __future__ import annotations

import io
import pickle
import re
from pathlib import Path
from typing import Any, NoReturn

from mrv2lab.trace.trace import TraceError

_SCALAR = rb"K.|M..|J....|G.{8}|[N\x88\x89]|" + b"|".join(b"\\x8a\\x%02x.{%d}" % (n, n) for n in range(10))
"""Numbers, True, False, None; whole numbers of up to 72 bits."""
# Tuples hold scalars alone: a nest of tuples as a key would be hashed by recursion in C until the stack is full.
_TUPLE = rb"|".join(rb"(?:" + _SCALAR + rb"){%d}[\x%02x]" % (n, 0x84 + n) for n in (1, 2, 3))
_TUPLE += rb"|\((?:" + _SCALAR + rb")*+t"
_FIXED = re.compile(rb"(?:" + _TUPLE + rb"|" + _SCALAR + rb"|[\](){}aesu\x94]|[hq].|j.{4}|\x95.{8})*+", re.DOTALL)
"""Instructions of fixed length, as many as there are in a row."""
_SIZED: dict[int, tuple[str, int]] = {
    0x8C: ("SHORT_BINUNICODE", 1),
    0x58: ("BINUNICODE", 4),
    0x8D: ("BINUNICODE8", 8),
    0x55: ("SHORT_BINSTRING", 1),
    0x43: ("SHORT_BINBYTES", 1),
    0x42: ("BINBYTES", 4),
}
"""Texts and bytes: name and how many bytes their length has."""
_LONG_BINPUT, _STOP, _PROTO = 0x72, 0x2E, 0x80
_REFUSED: dict[int, str] = {
    0x63: "GLOBAL, which imports",
    0x93: "STACK_GLOBAL, which imports",
    0x52: "REDUCE, which calls",
    0x62: "BUILD, which changes an instance",
    0x69: "INST, which calls",
    0x6F: "OBJ, which calls",
    0x81: "NEWOBJ, which makes an instance",
    0x92: "NEWOBJ_EX, which makes an instance",
    0x50: "PERSID, which refers outside",
    0x51: "BINPERSID, which refers outside",
    0x82: "EXT1, which imports",
    0x83: "EXT2, which imports",
    0x84: "EXT4, which imports",
    0x85: "a tuple of something else than numbers",
    0x86: "a tuple of something else than numbers",
    0x87: "a tuple of something else than numbers",
    0x74: "a tuple of something else than numbers",
}
HIGHEST = 5
"""Protocol."""


def load_plain(path: Path, data: bytes) -> Any:
    """The value in ``data``. Raises :class:`TraceError` naming ``path``, the byte and what is wrong with it."""
    end = _check(path, data)
    try:
        return _Unpickler(io.BytesIO(data[:end])).load()
    except MemoryError as error:
        raise TraceError(f"{path}: its pickle does not fit into memory; take the snapshot with fewer events") from error
    except Exception as error:  # damaged pickles raise whatever they like
        raise TraceError(f"{path}: a damaged pickle ({type(error).__name__}: {error})") from error


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError("it refers to something outside")


def _check(path: Path, data: bytes) -> int:
    """Goes through the instructions without running any; the byte behind the last one."""
    if len(data) < 2 or data[0] != _PROTO or not 2 <= data[1] <= HIGHEST:
        begins = f"it begins with {data[:8]!r}" if data else "it is empty"
        raise TraceError(f"{path}: no pickle of protocol 2 to {HIGHEST} ({begins}); torch.cuda.memory writes those")
    place = 2
    while True:
        found = _FIXED.match(data, place)
        place = found.end() if found else place
        if place >= len(data):
            raise TraceError(f"{path}: the pickle is cut off at byte {len(data):,}; take the snapshot again")
        code = data[place]
        if code == _STOP:
            return place + 1
        if code in _SIZED:
            name, width = _SIZED[code]
            size = int.from_bytes(data[place + 1 : place + 1 + width], "little")
            place += 1 + width + size
            if place > len(data):
                raise TraceError(
                    f"{path}: the pickle is cut off at byte {len(data):,}, within {name} of {size:,} bytes"
                )
        elif code == _LONG_BINPUT:
            index = int.from_bytes(data[place + 1 : place + 5], "little")
            if index > place:  # the memo is an array of that length: honest ones count what came before
                raise TraceError(
                    f"{path}: byte {place:,} wants a memo of {index:,} entries in so small a file; refused"
                )
            place += 5
        else:
            what = _REFUSED.get(code, f"the instruction {data[place : place + 1]!r}")
            if _cut_off(data, place):
                raise TraceError(f"{path}: the pickle is cut off at byte {len(data):,}; take the snapshot again")
            raise TraceError(
                f"{path}: no memory snapshot: at byte {place:,} the pickle has {what}; snapshots hold numbers, texts, "
                "lists and dicts only, and nothing else is run"
            )


def _cut_off(data: bytes, place: int) -> bool:
    """Whether an instruction that is allowed begins here and the file ends within it."""
    lengths = {0x4B: 1, 0x4D: 2, 0x4A: 4, 0x47: 8, 0x68: 1, 0x71: 1, 0x6A: 4, 0x95: 8}
    code = data[place]
    if code == 0x8A and place + 1 < len(data):
        return data[place + 1] < 10
    return code == 0x8A or code in lengths
