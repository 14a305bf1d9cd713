"""``FILE.meta.json`` beside a trace: what is known of the file and not in it."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from mrv2lab.trace.step_batches import FACTS
from mrv2lab.trace.trace import Problem, Trace

SIDECAR = ".meta.json"
_MOST_BYTES = 16 << 20


def with_sidecar(trace: Trace, path: Path) -> Trace:
    """``trace``, read from ``path``, with the capture's settings and its lists of steps out of the sidecar, if the file
    lacks them. A sidecar of other bytes than the file's (by its sha256) is not believed, and ``problems`` says so."""
    own = trace.info.extra.get(FACTS)
    own = own if isinstance(own, Mapping) else {}
    if "steps" in own:
        return trace
    sidecar = path.with_name(path.name + SIDECAR)
    meta = _read(sidecar)
    settings = meta.get("settings")
    if not isinstance(settings, Mapping) or not isinstance(meta.get("sha256"), str):
        return trace
    if meta["sha256"] != _sha256(path):
        problem = Problem(f"{sidecar.name} is about another version of this file (sha256), not used")
        return dataclasses.replace(trace, problems=(*trace.problems, problem))
    info = dataclasses.replace(trace.info, extra={**trace.info.extra, FACTS: {**settings, **own}})
    return dataclasses.replace(trace, info=info)


def _read(sidecar: Path) -> Mapping[str, Any]:
    """Nothing where it is not there, or is somebody else's."""
    try:
        if not sidecar.is_file() or sidecar.stat().st_size > _MOST_BYTES:  # a pipe would be waited for
            return {}
        found = orjson.loads(sidecar.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, Mapping) else {}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
