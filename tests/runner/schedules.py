"""Random schedules for both runners: arrivals, aborts, preemptions and steps, with a check after every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from mrv2lab.engine.engine import Engine
from mrv2lab.protocol import SamplingParams

Move = tuple[str, int, int, int]
MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 20), st.integers(1, 12), st.integers(0, 2)),
        st.tuples(st.just("abort"), st.integers(0, 9), st.just(0), st.just(0)),
        st.tuples(st.just("preempt"), st.integers(0, 9), st.just(0), st.just(0)),
        *[st.tuples(st.just("step"), st.integers(1, 3), st.just(0), st.just(0))] * 3,
    ),
    min_size=8,
    max_size=40,
)
OPTIONS: dict[str, Any] = {
    "async_scheduling": st.booleans(),
    "num_blocks": st.sampled_from([10, 14, 60]),
    "long_prefill_token_threshold": st.sampled_from([0, 1, 3]),
    "max_num_batched_tokens": st.sampled_from([5, 30]),
    "enable_prefix_caching": st.booleans(),
    "transfer": st.sampled_from(["barrier", "pinned_copy", "uva_pool"]),
    "lag": st.sampled_from([None, 0, 1]),
}
"""Engine keywords, to be drawn; a runner adds its own."""


def drive(engine: Engine, moves: list[Move], check: Callable[[Engine], None], seeded: bool = False) -> list[str]:
    """Do the moves, then run to the end, with a check after each step; the ids of the greedy requests.

    ``seeded``: requests of kind 2 bring a seed of their own.
    """
    shared = list(range(1, 13))
    greedy = []
    for move, a, b, kind in moves:
        live = sorted(engine.scheduler.requests)
        if move == "submit":
            prompt = shared[: max(a - 2, 0)] + list(range(30, 30 + min(a, 2)))
            seed = a if seeded and kind == 2 else None
            params = SamplingParams(max_tokens=b, temperature=0.6 * kind, ignore_eos=kind == 1, seed=seed)
            req_id = engine.submit(prompt, params)
            greedy += [req_id] if not kind else []
        elif move == "abort" and live:
            engine.abort(live[a % len(live)])
        elif move == "preempt" and engine.scheduler.running:
            running = engine.scheduler.running
            engine.scheduler.preempt(running[a % len(running)].req_id)
        elif move == "step":
            for _ in range(a):
                engine.step()
                check(engine)
    while engine.has_work():
        engine.step()
        check(engine)
    assert engine.scheduler.kv.pool.num_free == engine.scheduler.kv.pool.num_usable
    return greedy
