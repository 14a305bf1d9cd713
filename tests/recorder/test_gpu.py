"""The recorder on a real device: the same promises, and times from timing events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mrv2lab.engine.engine import Engine
from mrv2lab.protocol import SamplingParams
from mrv2lab.recorder.recorder import Recorder
from mrv2lab.recording.recording import Recording
from tests.recorder.runs import OPTIONS, busy_engine, work
from tests.recorder.test_recorder import bad_waits, in_order, recorded, test_recording_changes_nothing

pytestmark = pytest.mark.gpu

CUDA: dict[str, Any] = {"device": "cuda"}
POLICIES = ["barrier", "pinned_copy", "uva_pool"]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("recorder", [{}, {"top_k": 3, "check_every": 1}, {"device_times": "phases"}], ids=str)
def test_recording_changes_nothing_on_a_gpu(policy: str, recorder: dict[str, Any]) -> None:
    recorded(8, **CUDA)  # kernels are compiled here
    test_recording_changes_nothing(CUDA | {"transfer": policy}, recorder)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_checksum_fits_the_rebuilt_state_on_a_gpu(policy: str) -> None:
    _, recording = recorded(100, recorder={"check_every": 1}, transfer=policy, **CUDA)
    assert sum(bool(step.checksums) for step in recording.steps) > 60
    assert recording.verify() == []


def test_a_plain_step_on_a_gpu_waits_for_its_output_only() -> None:
    _, recording = recorded(**CUDA)
    assert bad_waits(recording) == []


def test_no_step_of_a_recorded_run_has_an_implicit_sync() -> None:
    with Engine("tiny", device="cuda", num_blocks=64, max_num_reqs=8) as engine:
        for i in range(3):
            engine.submit([1 + i, 2, 3], SamplingParams(max_tokens=60, ignore_eos=True))
        with Recorder(engine, check_every=2, top_k=4) as rec:
            for _ in range(8):
                engine.step()
            with engine.rt.watch_syncs() as seen:
                for _ in range(20):
                    engine.step()
        assert seen == []
        assert rec.recording.verify() == []


def test_device_times_on_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "gpu.mrv2rec"
    with busy_engine(**OPTIONS | CUDA) as engine:
        work(engine, 10)
        with Recorder(engine, path, device_times="launches"):
            work(engine, 60, seed=1)
    recording = Recording.load(path)
    assert not recording.header.modelled
    assert 0 < recording.clock["uncertainty_ns"] < 50_000_000  # measured; a busy machine's is larger
    launches = [m for m in in_order(recording) if m.kind in ("kernel", "run", "h2d", "d2h")]
    last: dict[str, int] = {}
    for mark in launches:
        assert 0 < mark.device_start_ns <= mark.device_end_ns, mark
        assert last.get(mark.stream, 0) <= mark.device_end_ns, mark
        # The device cannot be done before the host began to ask, give or take the clocks' uncertainty.
        assert mark.device_end_ns > mark.time_ns - 1_000_000, mark
        last[mark.stream] = mark.device_end_ns
    for step in recording.steps:
        waits = [mark for mark in step.marks if mark.kind == "synchronize"]
        copies = [mark for mark in step.marks if mark.kind == "d2h" and not mark.added]
        for wait in waits:
            assert copies[-1].device_end_ns <= wait.time_ns + 2 * recording.clock["uncertainty_ns"], step.step
