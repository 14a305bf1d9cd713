"""One line wrong in the V1 runner, and what finds it: the state's invariants, or the comparison with MRV2."""

from __future__ import annotations

import inspect
import sys
import textwrap
from typing import Any

import pytest

from mrv2lab.runner_v1 import bookkeeping, model_runner
from mrv2lab.runner_v1.model_runner import ModelRunnerV1
from mrv2lab.runner_v1.prepare import InputPreparation
from mrv2lab.runner_v1.sampler import Sampler
from mrv2lab.runtime.base import DeviceError
from tests.equality.compare import compare_exact
from tests.runner_v1.runs import MANY_ROWS, SAME_BATCHES, Idle, greedy_case, run
from tests.runner_v1.test_model_runner import Move, play
from tests.slow import mostly_slow

SCHEDULE: list[Move] = [
    ("submit", 9, 6, 0),
    ("step", 3, 0, 0),
    ("submit", 5, 4, 1),
    ("submit", 14, 8, 2),
    ("step", 3, 0, 0),
    ("preempt", 1, 0, 0),
    ("step", 2, 0, 0),
    ("abort", 0, 0, 0),
    ("submit", 3, 8, 1),
    ("submit", 18, 3, 2),
    ("step", 6, 0, 0),
]


def state_check() -> None:
    """The invariants on one schedule, synchronous and asynchronous."""
    for asynchronous in (True, False):
        play(
            SCHEDULE, {"runner": "v1", "num_blocks": 60, "async_scheduling": asynchronous, "max_num_batched_tokens": 8}
        )


def equality_check() -> None:
    """Tokens and logits of one workload with chunks, preemptions, early ends and steps that requests sit out."""
    case = greedy_case(0, loop="async", pool="storm", chunk="3", aborts="no", stop="eos", arrivals="random")
    compare_exact(run(case), run(case, **SAME_BATCHES, transfer="barrier", stream="deferred"))
    case = greedy_case(1, loop="async", pool="roomy", chunk="16", aborts="no", stop="length", arrivals="random")
    compare_exact(run(case, Idle(0), **MANY_ROWS), run(case, Idle(0), **SAME_BATCHES, **MANY_ROWS))


def mutate(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, old: str, new: str) -> None:
    """Replace ``old``, which occurs once in the function ``owner.name``, by ``new``."""
    function = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times in {name}"
    namespace: dict[str, Any] = dict(vars(sys.modules[function.__module__]))
    exec(compile("from __future__ import annotations\n" + source.replace(old, new), name, "exec"), namespace)
    monkeypatch.setattr(owner, name, namespace[name])


STATE = [
    (ModelRunnerV1, "_update_cached", "mine.extend(ids)", "mine.extend([])"),
    (ModelRunnerV1, "_update_cached", "batch.block_table.append_row(blocks, row)", "pass"),
    (ModelRunnerV1, "_update_cached", "outputs[:] = known[len(known) - num_outputs :]", "pass"),
    (ModelRunnerV1, "_update_states", "for req_id in batch.req_id_to_index.keys() - scheduled:", "for req_id in ():"),
    (ModelRunnerV1, "_finish", "self.sampler.forget(state.generator)", "pass"),
    (InputPreparation, "_fill", "starts[count + 1 :] = total", "pass"),
    (bookkeeping, "bookkeep_async", "lengths[row] = end + 1", "pass"),
    (bookkeeping, "bookkeep_sync", "lengths[row] = end", "pass"),
]

EQUALITY = [
    (ModelRunnerV1, "_update_cached", "computed_np[row] = num_computed", "pass"),
    (ModelRunnerV1, "_update_cached", "if req_id in resumed:", "if False:"),
    (InputPreparation, "_fill", "flat += positions", "flat += query_pos"),
    (InputPreparation, "_fill", "seq_lens < num_tokens", "seq_lens < 0"),
    (InputPreparation, "prepare", "batch.block_table.commit(count)", "batch.block_table.commit(1)"),
    (InputPreparation, "prepare", "self.query_pos.copy_to_gpu(total)", "self.query_pos.copy_to_gpu(1)"),
    (InputPreparation, "_prepare_input_ids", "if in_place and", "if"),
    (InputPreparation, "_scatter_prev_sampled", "np.array(prev_rows, np.int64)", "np.arange(len(prev_rows))"),
    (InputPreparation, "_step_batch", "key = (count, total, *map(id, tables))", "key = (count, 0)"),
]


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The runner imports its bookkeeping by name."""
    for name in ("bookkeep_async", "bookkeep_sync"):
        monkeypatch.setattr(model_runner, name, lambda *args, name=name: getattr(bookkeeping, name)(*args))
    return monkeypatch


def test_nothing_is_found_in_the_runner_as_it_is(patch: pytest.MonkeyPatch) -> None:
    state_check()
    equality_check()


CAUGHT = (AssertionError, DeviceError, ValueError, IndexError, KeyError, RuntimeError)
"""A bug that raises is a bug that is seen."""


@pytest.mark.parametrize("bug", range(len(STATE)), ids=[f"{name}-{i}" for i, (_, name, *_) in enumerate(STATE)])
def test_the_invariants_find(bug: int, patch: pytest.MonkeyPatch) -> None:
    mutate(patch, *STATE[bug])
    with pytest.raises(CAUGHT):
        state_check()


@pytest.mark.parametrize(
    "bug", mostly_slow(range(len(EQUALITY)), 1), ids=[f"{name}-{i}" for i, (_, name, *_) in enumerate(EQUALITY)]
)
def test_the_comparison_with_mrv2_finds(bug: int, patch: pytest.MonkeyPatch) -> None:
    mutate(patch, *EQUALITY[bug])
    with pytest.raises(CAUGHT):
        equality_check()


def test_a_chunk_that_draws_is_found(patch: pytest.MonkeyPatch) -> None:
    """The draws of a seeded request would depend on how its prompt was cut."""
    from tests.runner_v1.test_model_runner import test_seeded_requests_repeat_themselves

    mutate(patch, Sampler, "sample", "if discarded and generators:", "if False:")
    with pytest.raises(AssertionError):
        test_seeded_requests_repeat_themselves()
