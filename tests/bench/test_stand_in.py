"""Work of a given length: modelled on a deferred stream, refused where it would have none."""

from __future__ import annotations

import pytest

from mrv2lab.bench.stand_in import StandIn
from mrv2lab.runtime.cpu import CpuRuntime


def test_it_takes_its_modelled_time() -> None:
    rt = CpuRuntime()
    stand_in = StandIn(rt, 3.0)
    stand_in.queue()
    record = rt.main.last
    rt.synchronize()
    assert record is not None
    assert record.end_ns - record.start_ns == pytest.approx(3e6, rel=1e-3)


def test_two_of_one_runtime() -> None:
    rt = CpuRuntime()
    for milliseconds in (1.0, 2.0):
        StandIn(rt, milliseconds).queue()
    rt.synchronize()


def test_a_threaded_stream_models_no_times() -> None:
    rt = CpuRuntime(stream="threaded")
    try:
        with pytest.raises(ValueError, match="threaded stream models no times"):
            StandIn(rt, 1.0)
    finally:
        rt.close()
