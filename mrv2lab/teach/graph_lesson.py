"""What the lesson on graphs looks at: the table of shapes with its hits, every step's reason, what other capture sizes
would have cost, and the share of a step that goes into launches."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pandas as pd

from mrv2lab.config import GraphMode
from mrv2lab.engine.engine import Engine
from mrv2lab.graphs import CudaGraphManager, GraphStats
from mrv2lab.observer import Observer
from mrv2lab.protocol import SamplingParams
from mrv2lab.runtime.base import Runtime

SMALL: dict[str, Any] = {"max_num_reqs": 32, "max_model_len": 256, "num_blocks": 512}
"""Options of the engines here."""
_COUNT = re.compile(r"^[\d,]+ tokens?(?: as it is| as they are)?")
_OVER = re.compile(r"over the [\d,]+ tokens? there (?:is|are)")
WAYS: dict[str, GraphMode] = {"eager": "none", "pieces": "piecewise", "graph": "full_decode_only"}


def shapes(manager: CudaGraphManager) -> pd.DataFrame:
    """A row a shape, in the order of capture: which steps it takes, how many it took, tokens computed for nothing, and
    what its capture cost."""
    return pd.DataFrame(manager.rows()).set_index("graph")


def steps(stats: GraphStats) -> pd.DataFrame:
    """A row a step: requests, tokens, padding (tokens computed for nothing), what it did and why."""
    rows = [
        {
            "step": one.step,
            "requests": one.num_reqs,
            "tokens": one.num_tokens,
            "padding": one.padding,
            "mode": one.decision.mode,
            "why": one.decision.reason,
        }
        for one in stats.recent
    ]
    return pd.DataFrame(rows, columns=["step", "requests", "tokens", "padding", "mode", "why"]).set_index("step")


def reasons(stats: GraphStats) -> pd.DataFrame:
    """A row a reason, with the step's own number of tokens left out, the most frequent first: mode, steps, tokens,
    padding."""
    rows = [
        {
            "why": _OVER.sub("over the n there are", _COUNT.sub("n tokens", tally.decision.reason)),
            "mode": tally.decision.mode,
            "steps": tally.steps,
            "tokens": tally.tokens,
            "padding": tally.padding,
        }
        for tally in stats.tallies()
    ]
    frame = pd.DataFrame(rows, columns=["why", "mode", "steps", "tokens", "padding"])
    return frame.groupby(["why", "mode"]).sum().reset_index("mode").sort_values("steps", ascending=False, kind="stable")


def padding_of(tokens: Iterable[int], sizes: Sequence[int]) -> int:
    """Tokens that steps of ``tokens`` tokens compute for nothing under these capture sizes; eager ones compute none."""
    steps = np.fromiter(tokens, np.int64)
    ordered = np.unique(np.asarray(sizes, np.int64))
    steps = steps[steps <= ordered[-1]]
    return int((ordered[np.searchsorted(ordered, steps)] - steps).sum())


def best_sizes(tokens: Iterable[int], most: int) -> tuple[int, ...]:
    """At most ``most`` capture sizes that hold every step with the least padding in all."""
    values, counts = np.unique(np.fromiter(tokens, np.int64), return_counts=True)
    total = np.concatenate([[0], np.cumsum(counts)])
    sums = np.concatenate([[0], np.cumsum(values * counts)])
    # cost[i]: least padding of the i smallest values with the sizes so far, the largest being values[i - 1]
    cost = np.array([0] + [int(values[i] * total[i + 1] - sums[i + 1]) for i in range(len(values))])
    back = [np.zeros(len(values) + 1, np.int64)]
    for _ in range(min(most, len(values)) - 1):
        more, came = cost.copy(), np.zeros(len(values) + 1, np.int64)
        for i in range(1, len(values) + 1):
            spans = values[i - 1] * (total[i] - total[:i]) - (sums[i] - sums[:i])
            tried = cost[:i] + spans
            came[i] = int(tried.argmin())
            more[i] = tried[came[i]]
        cost = more
        back.append(came)
    sizes, i = [], len(values)
    for came in reversed(back):
        if i:
            sizes.append(int(values[i - 1]))
            i = int(came[i])
    return tuple(sorted(sizes))


class SpanTimes(Observer):
    """Microseconds of the host in each phase, on the runtime's clock. It hears no launch, so it slows none."""

    def __init__(self, rt: Runtime) -> None:
        self.us: dict[str, list[float]] = defaultdict(list)
        self._rt = rt

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = self._rt.now()
        yield
        self.us[name].append((self._rt.now() - start) / 1000)

    def span(self, name: str) -> Any:
        """See :meth:`Observer.span`."""
        return self._timed(name)


MOVABLE = ("input_ids", "positions", "seq_lens")
"""Input buffers that :func:`moved_buffer` may move."""


@contextmanager
def moved_buffer(engine: Engine, name: str | None = None, *, seed: int = 0) -> Iterator[None]:
    """The bug, to be attached by a ``with``: the MRV2 runner has one of its input buffers at a new address since the
    capture. Kernels fill the new one; graphs go on reading the old one, and nothing says so. ``name`` is one of
    :data:`MOVABLE`; None = one that ``seed`` draws. Raises ``ValueError`` for another name."""
    name = name if name is not None else MOVABLE[int(np.random.default_rng(seed).integers(len(MOVABLE)))]
    if name not in MOVABLE:
        raise ValueError(f"moved_buffer moves one of {MOVABLE}, got {name!r}")
    buffers: Any = engine.worker.runner.buffers
    engine.rt.synchronize()
    old = getattr(buffers, name)
    setattr(buffers, name, engine.rt.zeros(tuple(old.shape), old.dtype, name=name))
    try:
        yield
    finally:
        setattr(buffers, name, old)


def launch_share(
    requests: Sequence[int] = (1, 2, 4, 8, 16),
    *,
    model: Any = "tiny",
    steps: int = 12,
    ways: Sequence[str] = ("eager", "graph"),
    **options: Any,
) -> pd.DataFrame:
    """Steady decode of so many ``requests``, eagerly and by graphs: requests, way, ``forward_us`` (host time of
    launching the decoder's forward, median), ``step_us`` (a whole step, median) and ``share``, the one over the other.

    On a CPU the host's times are real and the device's are modelled; on a GPU both are real.
    """
    rows = []
    for way in ways:
        sizes = None if way == "eager" else tuple(sorted(requests))
        settings = SMALL | {"progress": False, "cudagraph_mode": WAYS[way], "cudagraph_capture_sizes": sizes} | options
        with Engine(model, **settings) as engine:
            for count in requests:
                forward, step = _steady(engine, count, steps)
                rows.append(
                    {
                        "requests": count,
                        "way": way,
                        "forward_us": forward,
                        "step_us": step,
                        "share": forward / step,
                    }
                )
    return pd.DataFrame(rows)


def _steady(engine: Engine, count: int, steps: int) -> tuple[float, float]:
    """Host microseconds of a decode step's forward, and of the step, medians."""
    for i in range(count):
        prompt = [1 + i % 100, 2, 3, 4]
        engine.submit(prompt, SamplingParams(max_tokens=steps + 12, temperature=0.0, ignore_eos=True))
    for _ in range(6):
        engine.step()
    before, engine.observer = engine.observer, SpanTimes(engine.rt)
    heard, times = engine.observer, []
    for _ in range(steps):
        start = engine.rt.now()
        engine.step()
        times.append((engine.rt.now() - start) / 1000)
    engine.observer = before
    while engine.has_work():
        engine.step()
    assert isinstance(heard, SpanTimes)
    return statistics.median(heard.us["forward"]), statistics.median(times)
