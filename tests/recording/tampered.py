"""Recording files that were tampered with, and what is said of them."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from mrv2lab.recording.recording import Recording
from mrv2lab.recording.schema import RecordingError
from mrv2lab.recording.write import RecordingWriter
from tests.recording.made_up import header, step

CHUNK = "chunks/00000/"


def write_good(path: Path) -> Path:
    """Three chunks of two steps, the first with a keyframe."""
    steps = [step(number) for number in range(6)]
    steps[0].keyframe = {"seeds": np.arange(8)}
    with RecordingWriter(path, header(), chunk_steps=2) as writer:
        writer.append(steps, {100: "<b>one</b>"})
    return path


def rebuilt(good: Path, path: Path, changes: dict[str, bytes | None]) -> Path:
    """A copy of ``good`` with some members replaced, added or (None) left out."""
    with zipfile.ZipFile(good) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        kept = {name: old.read(name) for name in old.namelist()}
        for name, content in (kept | changes).items():
            if content is not None:
                new.writestr(name, content)
    return path


def refused(path: Path, **options: Any) -> str:
    """The sentence with which ``path`` is refused."""
    with pytest.raises(RecordingError) as error:
        Recording.load(path, **options)
    sentence = str(error.value)
    assert sentence.startswith(f"{path.name}: ")
    assert "\n" not in sentence and len(sentence) < 400
    return sentence.removeprefix(f"{path.name}: ")


def edited(good: Path, member: str, edit: Callable[[Any], Any]) -> bytes:
    """A JSON member of ``good`` with a change; ``edit`` changes it in place or returns another."""
    with zipfile.ZipFile(good) as file:
        value = orjson.loads(file.read(member))
    return orjson.dumps(edit(value) or value)


def attempt(path: Path, content: bytes) -> Recording | None:
    """What comes of ``content``; anything but a recording or a RecordingError is an error of the test."""
    path.write_bytes(content)
    try:
        found = Recording.load(path, max_bytes=32 << 20)
    except RecordingError:
        return None
    assert [record.step for record in found] == list(range(len(found)))
    assert len(found) % 2 == 0, "whole chunks only"
    return found
