"""A benchmark's result as a file: figures with what was run, where, when and by which command."""

from __future__ import annotations

import datetime
import os
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from mrv2lab.bench.machine import describe_machine

RESULTS = Path(__file__).parent / "results"
"""Where results are kept that the notebooks show."""


def summary(samples: Sequence[float]) -> dict[str, float]:
    """Median, mean, quartiles, least and greatest of some samples, and how many there were."""
    ordered = sorted(samples)
    quartiles = statistics.quantiles(ordered, n=4) if len(ordered) > 1 else [ordered[0]] * 3
    return {
        "median": statistics.median(ordered),
        "mean": statistics.fmean(ordered),
        "q1": quartiles[0],
        "q3": quartiles[2],
        "min": ordered[0],
        "max": ordered[-1],
        "n": len(ordered),
    }


def write_result(path: str | Path, name: str, figures: dict[str, Any]) -> None:
    """Write ``figures`` with date, commit, machine, versions and command to ``path`` as indented JSON."""
    machine = describe_machine()
    machine.pop("missing")
    # Folders of this machine are nobody else's business, and the house tests refuse them.
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.orig_argv[1:]]
    result = {
        "name": name,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *words]),
        "machine": machine,
        "figures": figures,
    }
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(orjson.dumps(result, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def check_writable(path: str | Path) -> None:
    """Raise ``OSError`` where :func:`write_result` could not write ``path``: for a command that measures for minutes
    before it does."""
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file in it")
    place = path if path.exists() else next(folder for folder in path.absolute().parents if folder.exists())
    if place != path and not place.is_dir():
        raise NotADirectoryError(f"{path} cannot be written: {place} is no folder")
    if not os.access(place, os.W_OK):
        raise PermissionError(f"{path} cannot be written: {place} is read-only")


def newest_result(topic: str, folder: Path = RESULTS) -> dict[str, Any] | None:
    """The latest result of a GPU, by its own date, whose file name has ``topic`` in it; None if there is none."""
    found = [orjson.loads(path.read_bytes()) for path in folder.glob(f"*{topic}*.json")]
    return max((one for one in found if one["machine"]["gpu"]), key=lambda one: str(one["date"]), default=None)
