"""Time on demand: a kernel of a given length in front of a step's copies, so that a GPU trails as far as one wants.

A copy of some kilobytes is over microseconds after it was queued, so the window in which the host can overwrite its
source is narrow, and a race is a rare guest. Behind a spin it comes every time.
"""

from __future__ import annotations

import torch

from mrv2lab.ops.spin import spin
from mrv2lab.runtime.base import Runtime
from mrv2lab.runtime.cuda import CudaRuntime

SEGMENT = "races.spin"
_TRIAL = 200_000
"""Rounds of the calibrating launch: some milliseconds."""


class Spin:
    """A kernel that takes about ``milliseconds`` on this GPU. Making one synchronises; queueing one does not.

    Raises ``ValueError`` on a software stream, which trails by itself (``lag``), and for a time that is not positive.
    """

    def __init__(self, rt: Runtime, milliseconds: float) -> None:
        if not 0 < milliseconds <= 1000:
            raise ValueError(f"a spin takes between 0 and 1000 ms, got {milliseconds!r}")
        if not isinstance(rt, CudaRuntime):
            raise ValueError("a spin needs a GPU; a software stream trails the host by itself: see its lag")
        self.rt = rt
        # [1] int32
        self._state = rt.adopt(torch.ones(1, dtype=torch.int32), "races.spin.state")
        try:
            rt.function(SEGMENT)
        except KeyError:
            rt.register(SEGMENT, _spin)
        self.rounds = max(1, int(_TRIAL * milliseconds / self._trial_ms(rt)))

    def _trial_ms(self, rt: CudaRuntime) -> float:
        with rt.active():
            self.rounds = 1
            self.queue()  # compiles
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.rounds = _TRIAL
            begin.record(rt.main.cuda)
            self.queue()
            end.record(rt.main.cuda)
            end.synchronize()
        milliseconds: float = begin.elapsed_time(end)
        return milliseconds

    def queue(self) -> None:
        """Put one spin into the current stream."""
        self.rt.run(SEGMENT, self._state, self.rounds, writes=(self._state,))


def _spin(state: torch.Tensor, rounds: int) -> None:
    spin.execute("triton", (state, rounds))
