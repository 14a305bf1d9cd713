"""The recordings in traces/ (made on a GPU) open in Chromium, and say what they are."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from mrv2lab.recording.recording import Recording
from tests.slow import mostly_slow
from tests.widgets.conftest import OpenPage
from tests.widgets.harness import page as harness

TRACES = sorted((Path(__file__).parents[2] / "traces").glob("*.mrv2rec"))
each_trace = pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)


def test_there_are_some() -> None:
    policies = [f"h200_mrv2_{policy}" for policy in ("pinned_copy", "unsafe", "uva_pool")]
    assert [path.stem for path in TRACES] == ["h200_live", *policies, "h200_stories"]


@each_trace
def test_a_shipped_recording_is_whole_and_fits_its_sidecar(path: Path) -> None:
    recording = Recording.load(path)
    assert (recording.complete, recording.header.modelled, recording.header.device) == (True, False, "NVIDIA H200")
    assert recording.verify() == []
    assert sum(bool(step.checksums) for step in recording) >= min(3, len(recording) // 16)
    meta = json.loads(path.with_name(path.name + ".meta.json").read_text())
    assert meta["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert {"command", "date", "licence", "machine"} <= meta.keys()
    assert meta["machine"]["commit"]
    assert meta["steps"] == len(recording)


@pytest.mark.browser
@pytest.mark.parametrize("path", mostly_slow(TRACES[::-1], 2), ids=lambda path: path.stem)
def test_a_shipped_recording_opens_in_chromium(path: Path, open_page: OpenPage, screenshots: Path) -> None:
    recording = Recording.load(path)
    page = open_page(harness(recording, state={"index": min(30, len(recording) - 1)}))
    for key, index in (("Home", 0), ("ArrowRight", 1), ("End", len(recording) - 1)):
        page.locator(".mx-root").press(key)
        page.wait_for_function(f"document.querySelector('input[type=number]').value === '{index}'")
        assert page.locator(".mx-words li").count() > 0
    badges = page.locator(".mx-badge").all_inner_texts()
    assert "record: asynchronous, nothing was added" in badges
    assert any("NVIDIA H200" in badge for badge in badges)
    assert not any("modelled" in badge for badge in badges)
    page.screenshot(path=screenshots / f"recording_{path.stem}.png", full_page=True)
