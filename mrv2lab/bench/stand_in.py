"""Device work of a given length that computes nothing: it stands for a larger model, or for somebody who is late."""

from __future__ import annotations

import torch

from mrv2lab.check.spin import Spin
from mrv2lab.runtime.base import Runtime
from mrv2lab.runtime.cpu import CpuRuntime
from mrv2lab.runtime.software import DeferredStream

SEGMENT = "bench.stand_in"


class StandIn:
    """``queue`` puts ``milliseconds`` of work into the current stream: a spin kernel on a GPU; on a deferred software
    stream a launch that touches so many bytes that its *modelled* time is as long, and that costs the host none.

    Raises ``ValueError`` for a threaded stream, whose times are not modelled.
    """

    def __init__(self, rt: Runtime, milliseconds: float) -> None:
        self.rt = rt
        self._spin: Spin | None = None
        if not isinstance(rt, CpuRuntime):
            self._spin = Spin(rt, milliseconds)
            return
        if not isinstance(rt.main, DeferredStream):
            raise ValueError("a stand-in has a length on a GPU or a deferred stream; a threaded stream models no times")
        count = int(milliseconds * 1e6 * rt.costs.device_bytes_per_ns / 4)
        # [count] float32, all one and the same element: its bytes are only counted
        self._bytes = rt.adopt(torch.zeros(1).expand(count), SEGMENT)
        try:
            rt.function(SEGMENT)
        except KeyError:
            rt.register(SEGMENT, _nothing)

    def queue(self) -> None:
        """Put it into the current stream."""
        if self._spin is not None:
            self._spin.queue()
        else:
            self.rt.run(SEGMENT, self._bytes, reads=(self._bytes,))


def _nothing(touched: torch.Tensor) -> None:
    """Touch nothing."""
