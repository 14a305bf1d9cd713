"""A V1 step from outside: what it waits for, what it copies and in which order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mrv2lab.engine.engine import Engine
from mrv2lab.observer import EventLog
from mrv2lab.protocol import SamplingParams
from tests.engine.small import sampled
from tests.runner_v1.small import greedy, v1

# -- waits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"transfer": "barrier"}, ["prepare_inputs", "copied"]),
        ({"transfer": "pinned_copy"}, ["copied"]),
        ({"transfer": "uva_pool"}, ["copied"]),
        ({"transfer": "unsafe"}, ["copied"]),
        ({"transfer": "barrier", "async_scheduling": False}, ["copied"]),
        ({"transfer": "uva_pool", "async_scheduling": False}, ["copied"]),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_a_step_waits_for_barrier_and_output_only(options: dict[str, Any], expected: list[str]) -> None:
    """With arrivals, ends, preemptions and sampled requests. In the synchronous loop the bookkeeping waits."""
    log = EventLog()
    seen: list[list[str]] = []
    with v1(observer=log, num_blocks=14, **options) as engine:
        rng = np.random.default_rng(0)
        for i in range(40):
            if i < 12:
                params = SamplingParams(max_tokens=16, temperature=0.5 * (i % 2), ignore_eos=True, seed=i % 3 or None)
                engine.submit([1, 2, 3, 4, *rng.integers(0, 61, 6).tolist()], params)
            log.clear()
            engine.step()
            seen.append([mark.name.rpartition(".")[2] for mark in log.waits()])
        assert engine.scheduler.stats.num_preemptions
    assert seen[5:30] == [expected] * 25


def test_where_the_synchronous_loop_waits() -> None:
    log = EventLog()
    with v1(observer=log, async_scheduling=False) as engine:
        engine.generate([[1, 2, 3]], greedy(3))
    assert "barrier_wait" not in {span.name for span in log.spans}
    (wait, *_), bookkeeping = log.waits(), [s for s in log.spans if s.name == "postprocess/bookkeeping"]
    assert wait.stream == "main", "behind the sampler, on its stream"
    assert len(bookkeeping) == len(log.waits()) == 3
    assert not any(span.name == "wait_output" for span in log.spans)


# -- copies ------------------------------------------------------------------------------------------------------------


def copies(engine: Engine, log: EventLog) -> list[str]:
    """Names of the host arrays that the next step copies to the device, in order."""
    log.clear()
    engine.step()
    made = [mark.name.removesuffix(".pinned").removesuffix(".host") for mark in log.marks if mark.kind == "h2d"]
    assert dict(log.gauges)["h2d_copies"] == len(made)
    assert dict(log.gauges)["h2d_bytes"] == sum(mark.nbytes for mark in log.marks if mark.kind == "h2d")
    return made


EVERY_STEP = [
    "block_table.0",
    "query_start_loc",
    "discard_request_mask",
    "num_computed_tokens",
    "req_indices",
    "query_pos",
    "num_scheduled_tokens",
]


@pytest.mark.parametrize("loop", ["sync", "async"])
def test_a_plain_decode_step_copies_seven_or_eight_arrays(loop: str) -> None:
    """reference/v1.md 2.3: eight, and seven where the input ids are on the device already."""
    log = EventLog()
    with v1(observer=log, async_scheduling=loop == "async") as engine:
        for i in range(3):
            engine.submit([1 + i, 2, 3], greedy(20))
        for _ in range(3):
            engine.step()
        expected = EVERY_STEP + (["input_ids"] if loop == "sync" else [])
        for _ in range(5):
            assert copies(engine, log) == expected
        # The whole rectangle of 3 rows of 12 block ids, though nothing changed.
        assert next(mark.nbytes for mark in log.marks if mark.name == "block_table.0.host") == 3 * 12 * 4


def test_a_request_that_comes_or_draws_costs_more_copies() -> None:
    log = EventLog()
    with v1(observer=log) as engine:
        engine.submit([1, 2, 3], greedy(20))
        for _ in range(3):
            engine.step()
        engine.submit([4, 5], sampled(20))
        # The newcomer's prompt is on the host; the other's last token is written over its hole, on the device.
        assert copies(engine, log) == ["temperature", *EVERY_STEP, "input_ids"]
        assert copies(engine, log) == EVERY_STEP


def test_one_copy_on_the_device_where_rows_kept_their_place() -> None:
    """The fast path, the scatter, and a step whose decodes stand in front of a prefill: a copy on top of a copy."""
    log = EventLog()

    def fixes() -> list[str]:
        log.clear()
        engine.step()
        return [m.name for m in log.marks if m.name in ("v1.copy_prev_sampled", "scatter_sampled")]

    with v1(observer=log) as engine:
        engine.submit([1, 2, 3], greedy(4))
        engine.submit([4, 5], greedy(20))
        assert fixes() == []
        assert fixes() == ["v1.copy_prev_sampled"]
        engine.submit([6, 7, 8], greedy(20))
        assert fixes() == ["v1.copy_prev_sampled"]
        assert fixes() == ["v1.copy_prev_sampled"]
        # The first request is over: row 2 moves into row 0, and tokens have to move with it.
        assert fixes() == ["scatter_sampled"]
        assert fixes() == ["v1.copy_prev_sampled"]


def test_the_tokens_copy_is_queued_last() -> None:
    """V1's copy of the tokens waits for the bookkeeping (and a drafter); MRV2's comes right behind the sampler."""
    log = EventLog()
    with v1(observer=log) as engine:
        engine.submit([1, 2, 3], greedy(9))
        for _ in range(3):
            log.clear()
            engine.step()
    names = [span.name for span in log.spans]
    assert names.index("sample") < names.index("postprocess/bookkeeping") < names.index("copy_output")
    kinds = [mark.kind for mark in log.marks]
    assert kinds.index("d2h") > max(i for i, mark in enumerate(log.marks) if mark.name.startswith("v1.sample"))
