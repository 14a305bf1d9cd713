"""The scheduler's calls by a literal table, and figures that agree with what was recorded."""

from __future__ import annotations

import pytest

from mrv2lab.engine.engine import Engine
from mrv2lab.protocol import SamplingParams
from mrv2lab.recorder.recorder import Recorder
from mrv2lab.runtime.software import Record, SoftwareStream
from mrv2lab.teach.async_lesson import decode, trace
from mrv2lab.teach.async_pictures import SWEEP, bars_of, sweep_picture, timeline
from tests.steady_clock import SteadyClock


def test_the_worked_trace() -> None:
    table, wasted = trace()
    columns = ["tokens scheduled", "sent (computed, outputs)", "computed", "placeholders", "tokens known"]
    assert [[call, *row] for call, row in zip(table.index, table[columns].values.tolist(), strict=True)][:-1] == [
        ["schedule 0", 4, "new", 4, 0, 6],
        ["schedule 1", 2, "(4, 0)", 6, 1, 6],
        ["update 0", "", "", 6, 1, 6],
        ["schedule 2", 1, "(6, 1)", 7, 2, 6],
        ["update 1", "", "", 7, 1, 7],
        ["schedule 3", 1, "(7, 2)", 8, 2, 7],
        ["update 2", "", "", 8, 1, 8],
        ["schedule 4", 0, "", 8, 1, 8],
        ["update 3", "", "", 8, 0, 9],
    ]
    assert wasted == 0


def test_a_stop_token_wastes_a_row() -> None:
    assert trace(eos=(101,))[1] == 1
    assert trace(max_tokens=1)[1] == 0


@pytest.mark.parametrize("kind", ["v1", "mrv2"])
def test_async_hides_the_host_behind_a_slow_device(
    kind: str, host_clock: SteadyClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is 10 ms a launch: a synchronous step takes the device's time and some host time, V1's waits too."""
    execute = SoftwareStream.execute

    def slow(self: SoftwareStream, record: Record, after_ns: int) -> None:
        host_clock.advance(10_000_000)
        execute(self, record, after_ns)

    monkeypatch.setattr(SoftwareStream, "execute", slow)
    (sync, sync_us), (_, async_us) = (decode(kind, loop, 10_000, ["A", "B"], steps=4) for loop in (False, True))
    assert async_us < sync_us
    # What stands in for the device and what is waited for is not the host's.
    assert max(us for times in sync.phases.values() for us in times) < 10_000


def test_the_timeline_draws_what_was_recorded() -> None:
    with Engine("tiny", "mrv2", device="cpu", num_blocks=64, max_num_reqs=4) as engine:
        engine.submit([1, 2, 3], SamplingParams(max_tokens=8, ignore_eos=True))
        with Recorder(engine, check_every=0) as recorder:
            for _ in range(6):
                engine.step()
    bars = bars_of(recorder.recording, 1, 3)
    assert {bar.lane for bar in bars} == {"host works", "host waits", "device"}
    assert all(bar.start <= bar.end for bar in bars)
    figure = timeline({"a": recorder.recording}, 1, 3)
    assert sum(len(trace.y) for trace in figure.data) == len(bars)
    assert len({(trace.marker.color, trace.marker.pattern.shape) for trace in figure.data}) == 3


def test_the_sweep_has_a_line_for_each_pair() -> None:
    figure = sweep_picture((1, 10), dict.fromkeys(SWEEP, (5.0, 6.0)))
    assert {trace.name for trace in figure.data} == {"MRV2 sync", "MRV2 async", "V1 sync", "V1 async"}
