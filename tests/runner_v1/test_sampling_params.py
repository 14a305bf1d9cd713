"""Whole workloads with sampling parameters on the V1 runner: every token against the oracle, whatever happens to rows;
and what comes back besides tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mrv2lab.engine.engine import Engine
from mrv2lab.observer import EventLog
from mrv2lab.protocol import GrammarOutput, SamplingParams
from mrv2lab.runner_v1.persistent_batch import MoveCounters
from tests.engine.small import VOCAB
from tests.runner_v1.invariants import check_invariants
from tests.runner_v1.small import greedy, v1
from tests.runner_v1.watched import Watch, watched
from tests.sample import oracle
from tests.slow import mostly_slow

WAYS = {
    "sync": {"async_scheduling": False},
    "async": {},
    "async-barrier": {"transfer": "barrier"},
    "async-lag-0": {"lag": 0},
    "async-threaded": {"stream": "threaded", "transfer": "barrier"},
    "async-preempted": {"num_blocks": 12},
    "sync-preempted": {"num_blocks": 12, "async_scheduling": False, "reorder": "mrv2"},
    "async-chunks": {"num_blocks": 14, "long_prefill_token_threshold": 2, "reorder": "decode_first"},
}


def some_params(rng: np.random.Generator) -> SamplingParams:
    """Temperature 0 in half of them, so that tokens are determined."""

    def some(n: int) -> tuple[int, ...]:
        return tuple(rng.choice(VOCAB, n, replace=False).tolist())

    choices: dict[str, Any] = {
        "top_k": int(rng.integers(1, 30)),
        "top_p": float(rng.uniform(0.2, 1.0)),
        "min_p": float(rng.uniform(0.0, 0.3)),
        "repetition_penalty": float(rng.uniform(0.7, 2.5)),
        "frequency_penalty": float(rng.uniform(-1, 2)),
        "presence_penalty": float(rng.uniform(-1, 2)),
        "logit_bias": dict.fromkeys(some(3), 2.5),
        "allowed_token_ids": some(12),
        "min_tokens": int(rng.integers(1, 9)),
        "bad_words": (some(1), some(2), some(2)),
        "stop_token_ids": some(3),
        "logprobs": int(rng.integers(0, 4)),
    }
    picked = {name: value for name, value in choices.items() if rng.random() < 0.35}
    return SamplingParams(
        max_tokens=14,
        temperature=float(rng.choice([0.0, 0.0, 0.7, 1.5])),
        seed=int(rng.integers(99)) if rng.random() < 0.5 else None,
        **picked,
    )


def play(
    watch: Watch, seed: int, count: int = 14, between: Callable[[Engine], None] = lambda engine: None
) -> dict[str, SamplingParams]:
    """Requests come one by one, one is aborted now and then, until all have ended. ``between`` follows every step."""
    rng, engine = np.random.default_rng(seed), watch.engine
    params: dict[str, SamplingParams] = {}
    while len(params) < count or engine.has_work():
        if len(params) < count and rng.random() < 0.6:
            one = some_params(rng)
            params[engine.submit(rng.integers(0, VOCAB, int(rng.integers(1, 9))).tolist(), one)] = one
        unfinished = [req_id for req_id in params if not engine.requests[req_id].finished]
        if unfinished and rng.random() < 0.03:
            engine.abort(str(rng.choice(unfinished)))
        engine.step()
        between(engine)
    return params


@pytest.mark.parametrize("seed", mostly_slow(range(3), 1))
@pytest.mark.parametrize("way", WAYS)
def test_every_token_is_one_that_the_oracle_allows(way: str, seed: int) -> None:
    """With rows that come, go, condense and change places; preempted and resumed; in both loops."""
    with watched(**WAYS[way]) as watch:
        params = play(watch, seed)
        assert watch.check(params) > 60
        preempted = watch.engine.scheduler.stats.num_preemptions
        assert preempted or "preempted" not in way
        check_logprobs(watch, params)


def check_some(**options: Any) -> None:
    for seed in range(4):
        with watched(**options) as watch:
            watch.check(play(watch, seed))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("way", ["async-preempted", "sync-preempted", "async-chunks"])
def test_the_state_holds_between_steps(way: str, seed: int) -> None:
    with watched(**WAYS[way]) as watch:
        play(watch, 10 + seed, between=check_invariants)
        runner = watch.runner
        custom = runner.sampler.stages.custom
        assert not custom._functions and not runner.extras.prompts._progress and not runner.input_batch.sampling.used


def test_metadata_of_rows_that_have_moved_since_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: made anew when requests come or go, but not when rows change places."""
    check_some(reorder="mrv2", long_prefill_token_threshold=2)
    monkeypatch.setattr(MoveCounters, "changed", property(lambda moves: bool(moves.adds or moves.removes)))
    with pytest.raises(AssertionError):
        check_some(reorder="mrv2", long_prefill_token_threshold=2)


def check_logprobs(watch: Watch, params: dict[str, SamplingParams]) -> None:
    for req_id, _, logits, token, output, index in watch.chosen():
        wanted = params[req_id].logprobs
        if wanted is None:
            continue
        assert output.logprobs is not None
        ids, values = oracle.top_logprobs(oracle.clean(logits), token, wanted)
        assert output.logprobs.token_ids[index, : wanted + 1].tolist() == ids
        assert set(output.logprobs.token_ids[index, wanted + 1 :].tolist()) <= {-1}
        np.testing.assert_allclose(output.logprobs.values[index, : wanted + 1], values, rtol=1e-5, atol=1e-5)
        assert output.logprobs.ranks[index] == oracle.rank(oracle.clean(logits), token)


# -- what comes back besides tokens ------------------------------------------------------------------------------------


class Bad:
    """Raises at the third token of a request that asks for it."""

    def make(self, params: SamplingParams) -> Any:
        return self.call if params.extra_args.get("bad") else None

    def call(self, ids: Any, logits: Any) -> Any:
        if len(ids) == 2:
            raise ValueError("three is too many")
        return logits


@pytest.mark.parametrize("loop", ["sync", "async"])
def test_a_processor_that_raises_fails_its_request_alone(loop: str) -> None:
    bad = SamplingParams(max_tokens=8, ignore_eos=True, extra_args={"bad": 1})
    with v1(async_scheduling=loop == "async", logits_processors=[Bad()]) as engine:
        watch = Watch(engine)
        want = engine.generate([[1, 2, 3]], greedy(8))[0].token_ids
        outputs = engine.generate([[1, 2, 3], [4, 5]], [greedy(8), bad])
        assert outputs[0].token_ids == want
        errors = [output.errors for output in watch.outputs if output.errors]
        assert errors == [{"r2": "custom processor Bad.call failed: ValueError: three is too many"}]
        while engine.has_work():
            engine.step()
        engine.rt.synchronize()
        custom = engine.worker.runner.sampler.stages.custom
        assert not custom._functions and not custom._errors


def test_nan_counts_where_they_are_wanted() -> None:
    with v1(count_nans=True) as engine:
        watch = Watch(engine)
        engine.rt.register("test.poison", lambda logits: logits[1, 3:5].fill_(float("nan")))
        model = watch.runner.model

        class Poison:
            forward = model.forward

            def compute_logits(self, indices: Any, n: int) -> Any:
                logits = model.compute_logits(indices, n)
                engine.rt.run("test.poison", logits, writes=(logits,))
                return logits

        watch.runner.model = Poison()
        engine.generate([[1, 2, 3], [4, 5]], greedy(3))
        assert [output.num_nans for output in watch.outputs[:3]] == [{"r1": 2}] * 3


def test_a_grammar_masks_the_raw_logits_of_its_request() -> None:
    """Between the two calls; what it forbids is impossible in raw logprobs, too."""
    params = SamplingParams(max_tokens=4, ignore_eos=True, logprobs=2)
    with v1() as engine:
        engine.submit([1, 2, 3], params, request_id="free")
        engine.submit([4, 5], params, request_id="bound")
        engine.worker.execute_model(engine.core.project(engine.scheduler.schedule()))
        mask = np.array([[[1 << 9, 1 << 1]]], np.int32)  # tokens 9 and 33
        output = engine.worker.runner.sample_tokens(GrammarOutput(["bound"], mask)).get_output()
        assert output.req_ids == ["free", "bound"]
        free, bound = output.sampled_token_ids
        assert bound[0] in (9, 33) and free[0] not in (9, 33)
        logprobs = output.logprobs
        assert logprobs is not None and set(logprobs.token_ids[1].tolist()) == {9, 33}
        assert np.exp(logprobs.values[1, 1:]).sum() == pytest.approx(1)
        assert np.exp(logprobs.values[0, 1:]).sum() < 0.9


MODES = ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]


@pytest.mark.parametrize("temperature", [0.0, 0.5])
@pytest.mark.parametrize("mode", MODES)
def test_logprobs_modes(mode: Any, temperature: float) -> None:
    params = SamplingParams(max_tokens=6, ignore_eos=True, temperature=temperature, top_k=4, logprobs=5, seed=1)
    with watched(logprobs_mode=mode) as watch:
        plain = SamplingParams(max_tokens=6, ignore_eos=True, temperature=2 * temperature, logprobs=0)
        watch.engine.generate([[1, 2, 3], [4, 5]], [params, plain])
        given = {"r0": params, "r1": plain}
        count = 0
        for req_id, number, logits, token, output, index in watch.chosen():
            final = watch.engine.requests[req_id]
            row = oracle.Row(given[req_id], final.prompt_token_ids, final.token_ids[:number])
            x = oracle.process(logits, row) if mode.startswith("processed") else oracle.clean(logits)
            want = oracle.log_softmax(x) if mode.endswith("logprobs") else x
            assert output.logprobs is not None
            wanted = 1 + (given[req_id].logprobs or 0)
            ids, values = output.logprobs.token_ids[index, :wanted], output.logprobs.values[index, :wanted]
            assert ids[0] == token
            np.testing.assert_allclose(values, want[ids], rtol=1e-5, atol=1e-5)
            count += 1
        assert count == 12


def test_logprobs_describe_the_token_that_was_forced() -> None:
    with watched() as watch:
        engine = watch.engine
        engine.rt.register("test.force", lambda sampled: sampled.fill_(17))
        watch.runner.force = lambda ids, sampled: engine.rt.run("test.force", sampled, writes=(sampled,))
        params = SamplingParams(max_tokens=3, ignore_eos=True, logprobs=1)
        engine.generate([[1, 2, 3]], params)
        check_logprobs(watch, {"r0": params})
        assert [output.logprobs.token_ids[0, 0] for output in watch.outputs] == [17] * 3  # type: ignore[union-attr]


def test_a_batch_that_asks_for_nothing_launches_what_it_always_did() -> None:
    """The marks of decode steps, greedy and sampled, before there were any of these parameters; and again after a
    request with all of them has gone."""
    everything = SamplingParams(
        max_tokens=3,
        temperature=0.7,
        top_k=9,
        top_p=0.9,
        min_p=0.01,
        presence_penalty=0.5,
        logit_bias={3: 1.0},
        allowed_token_ids=tuple(range(40)),
        min_tokens=2,
        bad_words=((3,),),
        logprobs=3,
        prompt_logprobs=2,
    )
    log = EventLog()
    for temperature, draw in ((0.0, "v1.sample.greedy"), (1.0, "v1.sample.random")):
        with v1(observer=log) as engine:
            engine.submit([1, 2, 3], SamplingParams(max_tokens=30, temperature=temperature, ignore_eos=True))
            steps = []
            for step in range(16):
                if step == 5:
                    engine.submit([4, 5, 6], everything)
                log.clear()
                engine.step()
                names = [mark.name for mark in log.marks if mark.kind in ("run", "kernel") and "layer" not in mark.name]
                steps.append((names, [(m.kind, m.name) for m in log.marks if m.kind in ("h2d", "d2h", "synchronize")]))
        own = [name for name in steps[4][0] if name.startswith("v1.")]
        assert own == ["v1.logits_indices", "v1.copy_prev_sampled", draw]
        assert all(len([kind for kind, _ in copies if kind == "d2h"]) == 1 for _, copies in (steps[4], steps[15]))
        assert steps[15][0] == steps[4][0]
        assert [kind for kind, _ in steps[15][1]] == [kind for kind, _ in steps[4][1]]
        assert len(steps[6][0]) > len(steps[4][0]) + 8


# -- on a GPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["barrier", "pinned_copy", "uva_pool"])
def test_on_a_gpu_every_token_is_one_that_the_oracle_allows(policy: str) -> None:
    with watched(device="cuda", transfer=policy, num_blocks=14) as watch:
        params = play(watch, 1)
        assert watch.check(params) > 60
        check_logprobs(watch, params)


@pytest.mark.gpu
def test_on_a_gpu_no_stage_synchronises() -> None:
    """But for the waits that V1 has on purpose, which torch's debug mode does not see."""
    everything: dict[str, Any] = {
        "temperature": 0.7,
        "top_k": 9,
        "top_p": 0.9,
        "min_p": 0.01,
        "presence_penalty": 0.5,
        "logit_bias": {3: 1.0},
        "allowed_token_ids": tuple(range(40)),
        "min_tokens": 30,
        "stop_token_ids": (7,),
        "bad_words": ((3,), (4, 5)),
        "logprobs": 3,
        "extra_args": {"count": True},
    }
    with v1(device="cuda", num_blocks=60, logits_processors=[_Add()]) as engine:
        for i in range(3):
            engine.submit([1 + i, 2, 3], SamplingParams(max_tokens=30, **everything if i else {}))
        for _ in range(8):
            engine.step()
        with engine.rt.watch_syncs() as seen:
            for _ in range(10):
                engine.step()
        assert seen == []


class _Add:
    def make(self, params: SamplingParams) -> Any:
        return (lambda ids, logits: logits.add_(1)) if params.extra_args else None
