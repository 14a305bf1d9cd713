"""V1's dummy runs, a copy of the preparation kept by hand: nothing of them is left, whoever is in the batch."""

from __future__ import annotations

import hashlib
from contextlib import nullcontext
from typing import Any

import pytest

from mrv2lab.engine.engine import Engine
from mrv2lab.observer import EventLog
from mrv2lab.protocol import SamplingParams
from mrv2lab.runner_v1 import dummy
from mrv2lab.runner_v1.dummy import DummyRuns
from mrv2lab.runtime.base import DeviceError
from tests.runner_v1.small import v1
from tests.runner_v1.test_mutants import mutate
from tests.slow import mostly_slow

SHAPES = ((1, 1), (4, 4), (3, 2), (40, 1), (64, 4), (17, None))
GRAPHS: dict[str, Any] = {"cudagraph_mode": "full_and_piecewise", "progress": False}
HOST_SCRATCH = ("query_start_loc", "num_scheduled_tokens")
"""Host buffers that every step fills anew."""


def digest(engine: Engine) -> dict[str, str]:
    """Hashes of the KV cache and of the host's tables, and whose rows are whose."""
    engine.rt.synchronize()
    runner, raw = engine.worker.runner, engine.rt.raw
    found = {name: table for name, table in runner.host_tables().items() if name not in HOST_SCRATCH}
    for layer, pair in enumerate(engine.worker.kv_caches):
        found |= {f"{kind}.{layer}": raw(cache).cpu().numpy() for kind, cache in zip("kv", pair, strict=True)}
    hashes = {name: hashlib.sha256(table.tobytes()).hexdigest() for name, table in found.items()}
    batch = runner.input_batch
    return hashes | {"rows": repr((batch.req_id_to_index, batch.prev_req_id_to_index, list(runner.requests)))}


def run(engine: Engine, dummies: bool, look: bool = True) -> list[list[int]]:
    """Requests that come and go; a dummy run in front of every step, and a look at everything around it."""
    params = [
        SamplingParams(max_tokens=7, ignore_eos=True),
        SamplingParams(max_tokens=9, temperature=1.0, seed=3, ignore_eos=True, repetition_penalty=1.2),
        SamplingParams(max_tokens=5, temperature=1.0, top_p=0.9, seed=4, ignore_eos=True, prompt_logprobs=1),
    ]
    ids = [engine.submit([1 + i, 2, 3, 4, 5][: 2 + i], one) for i, one in enumerate(params * 2)]
    step = 0
    while engine.has_work():
        if dummies:
            before = digest(engine) if look else {}
            engine.worker.runner.dummy_run(*SHAPES[step % len(SHAPES)])
            assert not look or digest(engine) == before
            step += 1
        engine.step()
    return [engine.output(req_id).token_ids for req_id in ids]


@pytest.mark.parametrize("graphs", [{}, GRAPHS], ids=["eager", "graphs"])
@pytest.mark.parametrize("transfer", ["barrier", "pinned_copy", "uva_pool"])
@pytest.mark.parametrize("stream", mostly_slow(["deferred", "threaded"], 1))
def test_nothing_is_left_behind(stream: str, transfer: str, graphs: dict[str, Any]) -> None:
    options = {"stream": stream, "transfer": transfer, "num_blocks": 9} | graphs
    with v1(**options) as engine:
        wanted = run(engine, dummies=False)
    with v1(**options) as engine:
        assert run(engine, dummies=True) == wanted
    with v1(**options) as engine:
        assert run(engine, dummies=True, look=False) == wanted, "with steps in flight"


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [{}, GRAPHS], ids=["eager", "graphs"])
def test_nothing_is_left_behind_on_a_gpu(graphs: dict[str, Any]) -> None:
    with v1(device="cuda", num_blocks=9, **graphs) as engine:
        wanted = run(engine, dummies=False)
    with v1(device="cuda", num_blocks=9, **graphs) as engine:
        assert run(engine, dummies=True) == wanted


def test_a_dummy_run_is_no_step() -> None:
    log = EventLog()
    with v1(observer=log, **GRAPHS) as engine:
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
        runner = engine.worker.runner
        batch, steps = runner.batch, len(runner.graphs.stats.recent)
        log.clear()
        runner.dummy_run(3, 3)
        assert not (log.spans or log.marks or log.gauges)
        assert runner.batch is batch and len(runner.graphs.stats.recent) == steps and engine.rt.observer is log


def what_the_decoder_is_given() -> None:
    """Behind steps that have filled the same buffers."""
    with v1(transfer="barrier") as engine:
        engine.generate([[1 + i, 2, 3, 4, 5] for i in range(4)], SamplingParams(max_tokens=4, ignore_eos=True))
        runner, seen = engine.worker.runner, []
        build = runner.inputs_builder.build
        runner.inputs_builder.build = lambda *args: seen.append((args[0], build(*args))) or seen[-1][1]
        runner.dummy_run(8, 3, context=20)
        ((batch, inputs),) = seen
        meta, read = inputs.attn_metadata[0], engine.rt.read
        assert batch.host.seq_lens_upper_bound.tolist() == [20, 20, 20]
        assert read(meta.query_start_loc).tolist() == [0, 2, 5, 8]
        assert read(meta.seq_lens).tolist() == [2, 3, 3] and read(runner.inputs.seq_lens).tolist() == [2, 3, 3, 0]
        assert not read(meta.block_table).any() and (read(meta.slot_mapping) == -1).all()
        assert not read(inputs.positions).any()


def test_what_the_decoder_is_given() -> None:
    what_the_decoder_is_given()


@pytest.mark.parametrize(
    ("tokens", "reqs", "words"),
    [
        (0, 1, "1 to max_num_batched_tokens = 2048"),
        (2049, 4, "1 to max_num_batched_tokens"),
        (3, 4, "1 to 3 requests, got 4"),
        (6, 5, "1 to 4 requests, got 5"),
        (6, 0, "got 0"),
        (97, 2, "spread them over 3 requests"),
    ],
)
def test_impossible_batches_are_refused(tokens: int, reqs: int, words: str) -> None:
    with v1() as engine:
        with pytest.raises(ValueError, match=words):
            engine.worker.runner.dummy_run(tokens, reqs)
        assert engine.generate([[1, 2]], SamplingParams(max_tokens=2))[0].finished


def test_between_the_two_calls_of_a_step_it_is_refused() -> None:
    with v1() as engine:
        engine.worker.runner._forwarded = object()
        with pytest.raises(RuntimeError, match="between execute_model and sample_tokens"):
            engine.worker.runner.dummy_run(2, 2)


# -- mutants -----------------------------------------------------------------------------------------------------------

BUGS = [
    (dummy, "_fill", "slot_mappings.fill_(-1)", "slot_mappings.zero_()"),
    (dummy, "_fill", "slot_mappings.fill_(-1)", "pass"),
    (DummyRuns, "_prepare", "inputs.num_scheduled_tokens.copy_to_gpu(count)", "pass"),
    (dummy, "_fill", "table[:count].fill_(NULL_BLOCK)", "pass"),
    (dummy, "_fill", "positions.zero_()", "pass"),
    (dummy, "_fill", "seq_lens.zero_()", "pass"),
    (DummyRuns, "_prepare", "inputs.query_start_loc.np", "self._runner.input_batch.num_prompt_tokens"),
]


def both_checks() -> None:
    what_the_decoder_is_given()
    with v1(num_blocks=9) as engine:
        run(engine, dummies=True)


@pytest.mark.parametrize("bug", range(len(BUGS)))
def test_bugs_are_found(bug: int, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch, *BUGS[bug])
    with pytest.raises((AssertionError, ValueError)):
        both_checks()


def test_outside_the_barrier_it_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM #34866: host buffers that the copies of the step in flight have yet to read."""
    options = {"transfer": "barrier", "num_blocks": 30}
    with v1(**options) as engine:
        wanted = run(engine, dummies=False)
    monkeypatch.setattr(dummy, "nullcontext", nullcontext, raising=False)
    mutate(monkeypatch, DummyRuns, "run", "with runner.barrier:", "with nullcontext():")
    with v1(**options) as engine, pytest.raises((AssertionError, DeviceError)):
        assert run(engine, dummies=True, look=False) == wanted


def test_in_a_synchronous_loop_the_next_step_leaves_its_buffers_alone() -> None:
    """Where V1 has no event to wait for, since the bookkeeping of a step waits for all of it."""
    with v1(async_scheduling=False, max_num_reqs=8) as engine:
        seen: list[list[int]] = []
        starts = engine.worker.runner.inputs.query_start_loc.gpu
        forward = engine.worker.runner.model.forward
        engine.rt.register("test.look", lambda values: seen.append(values[:4].tolist()))

        def looked_at(inputs: Any) -> Any:
            engine.rt.run("test.look", starts, reads=(starts,))
            return forward(inputs)

        engine.worker.runner.model.forward = looked_at
        engine.submit([1, 2, 3, 4], SamplingParams(max_tokens=1))
        engine.worker.runner.dummy_run(5, 3)
        engine.worker.runner.dummy_run(7, 2)
        engine.step()
        assert seen == [[0, 1, 3, 5], [0, 3, 7, 7], [0, 4, 4, 4]]
