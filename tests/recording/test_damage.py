"""Files that were cut off or damaged: what came before is kept, and one sentence says what is missing."""

from __future__ import annotations

import random
import zipfile
from pathlib import Path

from tests.recording.tampered import attempt


def test_cut_off_anywhere(good: Path, tmp_path: Path) -> None:
    content = good.read_bytes()
    with zipfile.ZipFile(good) as file:
        starts = {info.filename: info.header_offset for info in file.infolist()}
    found = {end: attempt(tmp_path / "a", content[:end]) for end in [*range(0, len(content), 50), *starts.values()]}
    steps = {end: -1 if recording is None else len(recording) for end, recording in found.items()}
    assert [steps[end] for end in sorted(steps)] == sorted(steps.values()), "more bytes never give fewer steps"
    assert set(steps.values()) == {-1, 0, 2, 4, 6}
    assert steps[starts["end.json"]] == 6
    whole = found[max(steps)]
    assert whole is not None and whole.complete, "only the directory is cut, and nobody needs it"
    cut = found[starts["chunks/00002/steps.json"]]
    assert cut is not None
    assert cut.problems[0].startswith("cut off after step 3: the file ends at byte ")
    inside = attempt(tmp_path / "a", content[: starts["chunks/00002/steps.json"] + 60])
    assert inside is not None
    assert inside.problems[0].startswith("cut off after step 3: the file ends within 'chunks/00002/steps.json'; later")


def test_a_damaged_member_costs_what_follows_it(good: Path, tmp_path: Path) -> None:
    content = bytearray(good.read_bytes())
    with zipfile.ZipFile(good) as file:
        info = file.getinfo("chunks/00001/sampled.token.npy")
    content[info.header_offset + 30 + len(info.filename) + 20] ^= 0x10
    found = attempt(tmp_path / "a", bytes(content))
    assert found is not None
    assert (len(found), found.complete) == (2, False)
    assert "cut off after step 1: 'chunks/00001/sampled.token.npy' is damaged" in found.problems[0]


def test_random_damage(good: Path, tmp_path: Path) -> None:
    """Flipped bytes: a prefix of the recording, or one sentence. 300 files, the same ones every time."""
    rng, content = random.Random(3), good.read_bytes()
    kept = 0
    for _ in range(300):
        damaged = bytearray(content)
        for _ in range(rng.choice((1, 1, 4, 30))):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        kept += attempt(tmp_path / "a", bytes(damaged)) is not None
    assert 30 < kept < 300, "both must have been seen"
