"""The twin itself: what it refuses, what it finds and when, and that both sides run as far ahead as alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from mrv2lab.check.side import Weights, make_side, weights_of
from mrv2lab.check.twin import Twin, TwinReport, equality_of
from mrv2lab.check.workloads import MODEL
from mrv2lab.config import CacheConfig, EngineConfig, RunnerConfig, SchedulerConfig
from mrv2lab.engine.async_scheduler import AsyncScheduler
from mrv2lab.engine.engine import Engine
from mrv2lab.engine.workload import Workload, steady
from mrv2lab.protocol import SamplingParams
from mrv2lab.sample.sampler import Sampler
from mrv2lab.teach import mutants
from mrv2lab.teach.mutants import Patch
from mrv2lab.teach.mutants.mutant import Mutant
from tests.slow import mostly_slow

MRV2 = RunnerConfig(device="cpu")
V1 = RunnerConfig(runner="v1", device="cpu", transfer="barrier", reorder="mrv2")
V1_UNORDERED = dataclasses.replace(V1, reorder="none")


@pytest.fixture(scope="module")
def weights() -> Weights:
    return weights_of(MODEL)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def config(runner: RunnerConfig = MRV2, **scheduler: Any) -> EngineConfig:
    """6 rows, a pool that preempts, chunks of 5."""
    sizes = {"max_num_reqs": 6, "max_num_batched_tokens": 24, "max_model_len": 48, "long_prefill_token_threshold": 5}
    return EngineConfig(MODEL, CacheConfig(num_blocks=14, block_size=4), SchedulerConfig(**sizes | scheduler), runner)


def greedy(count: int = 10) -> Workload:
    return steady(count, every=1, prompt_len=(3, 14), max_tokens=(4, 14))


def sampled(count: int = 10) -> Workload:
    return steady(count, every=1, prompt_len=(3, 14), max_tokens=(4, 14), temperature=0.8, ignore_eos=False)


def run(a: EngineConfig, b: EngineConfig, work: Workload, **options: Any) -> TwinReport:
    with Twin.build(a, b, **options) as twin:
        return twin.run(work, aborts=[(4, 2), (9, 3)])


# -- what agrees -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("async_scheduling", mostly_slow([True, False], 1))
@pytest.mark.parametrize("work", [greedy, sampled])
@pytest.mark.parametrize(
    ("a", "b", "equality"),
    [
        (MRV2, dataclasses.replace(MRV2, transfer="barrier"), "exact"),
        (MRV2, dataclasses.replace(MRV2, stream="threaded"), "exact"),
        (dataclasses.replace(MRV2, lag=1), dataclasses.replace(MRV2, lag=0, transfer="pinned_copy"), "exact"),
        (V1, MRV2, "exact"),
        (MRV2, V1, "exact"),
        (V1, dataclasses.replace(V1, transfer="uva_pool", stream="threaded"), "exact"),
        (V1_UNORDERED, dataclasses.replace(V1_UNORDERED, lag=1), "exact"),
        (V1_UNORDERED, MRV2, "near"),
        (V1, V1_UNORDERED, "near"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.runner,
)
def test_pairs(
    a: RunnerConfig, b: RunnerConfig, equality: str, work: Callable[[], Workload], async_scheduling: bool
) -> None:
    report = run(config(a, async_scheduling=async_scheduling), config(b, async_scheduling=async_scheduling), work())
    assert report.equal and report.equality == equality, str(report)
    assert report.steps > 15 and report.rows > 50 and report.stats.num_preemptions
    assert "are equal" in str(report)


def test_a_twins_tokens_are_those_of_an_engine_alone() -> None:
    """Of its a; b changes nothing."""
    report = run(config(), config(dataclasses.replace(MRV2, transfer="barrier")), sampled())
    options = {"max_num_reqs": 6, "max_num_batched_tokens": 24, "max_model_len": 48, "long_prefill_token_threshold": 5}
    with Engine(MODEL, device="cpu", num_blocks=14, block_size=4, **options) as engine:
        for index, arrival in enumerate(sampled().resolve(MODEL.vocab_size)):
            while engine.num_steps < arrival.step:
                engine.step()
            engine.submit(arrival.prompt, arrival.params, request_id=f"w{index}")  # type: ignore[arg-type]
            for step, victim in ((4, 2), (9, 3)):
                if engine.num_steps == step and f"w{victim}" in engine.scheduler.requests:
                    engine.abort(f"w{victim}")
        while engine.has_work():
            engine.step()
        assert report.tokens == {req_id: output.token_ids for req_id, output in engine.requests.items()}


# -- what is found -----------------------------------------------------------------------------------------------------


def test_the_first_difference_is_a_value() -> None:
    report = run(config(), config(dataclasses.replace(MRV2, transfer="unsafe")), greedy())
    found = report.difference
    assert found is not None and not report.equal
    # Step 1's lengths lie in the buffer that step 0's copy has yet to read.
    where = (found.step, found.tensor, found.request, found.where, found.at)
    assert where == (0, "query_start_loc", "w0", "batch index", 0)
    assert (found.a, found.b) == (13, 1)
    assert found.names == ("mrv2(transfer=uva_pool)", "mrv2(transfer=unsafe)")
    assert str(found) in str(report)


@pytest.mark.parametrize("bug", [mutants.pool_depth_1, mutants.one_staging_buffer], ids=lambda bug: bug.name)
@pytest.mark.parametrize("equality", ["exact", "near"])
def test_b_runs_two_steps_ahead_in_both_classes(equality: Any, bug: Mutant) -> None:
    """Else such a race would not open: neither reading nor a's tokens make b's host wait."""
    assert run(config(), config(), greedy(), equality=equality).equal
    assert not run(config(), config(), greedy(), equality=equality, around_b=bug).equal


def test_a_runs_two_steps_ahead_too() -> None:
    assert not run(config(dataclasses.replace(MRV2, pool_depth=1)), config(), greedy(), equality="near").equal


def test_the_scheduler_does_not_hear_of_a_step_that_differs() -> None:
    """Exact: b must agree first."""
    with Twin.build(config(), config(dataclasses.replace(MRV2, transfer="unsafe"))) as twin:
        twin.run(greedy())
        assert twin.scheduler.num_steps_in_flight == 2
        assert not any(twin.tokens.values())
        with pytest.raises(RuntimeError, match="stopped at its first difference: step 0: query_start_loc"):
            twin.step()


def other(weights: Weights, factor: float) -> Weights:
    return weights | {"model.norm.weight": weights["model.norm.weight"] * factor}


@pytest.mark.parametrize(
    ("equality", "factor", "tensor"),
    [("near", 1.0001, None), ("near", 1.01, "logits"), ("exact", 1.0001, "logits")],
)
def test_other_weights(weights: Weights, equality: Any, factor: float, tensor: str | None) -> None:
    """A twin from parts, as it is made by hand. Near: b goes along a's tokens, so it stays as near as it began."""
    made = config()
    a, b = make_side(made, weights, "a"), make_side(made, other(weights, factor), "b")
    with Twin(AsyncScheduler(made.scheduler, made.cache), a, b, equality=equality) as twin:
        report = twin.run(greedy())
    assert (report.difference.tensor if report.difference else None) == tensor, str(report)
    if tensor is None:
        assert 1e-5 < report.near.worst < 1e-3
        report.near.check()


def second_best(patch: Patch) -> None:
    def sample(original: Any, self: Sampler, out: Any, logits: Any, *rest: Any) -> None:
        self.rt.run("test.second", out, logits, reads=(logits,), writes=(out,))

    patch.around(Sampler, "sample", sample)


def test_a_forced_token_does_not_hide_a_wrong_choice() -> None:
    """b's own choice is kept before a's is written over it."""
    bug = Mutant("second_best", "Takes the second best.", "mrv2", ("twin",), second_best)
    with Twin.build(config(), config(), equality="near", around_b=bug) as twin:
        twin.b.rt.register("test.second", lambda out, logits: out.copy_(logits.topk(2, dim=1).indices[:, 1]))
        report = twin.run(greedy())
    assert report.difference is not None and report.difference.tensor == "tokens"
    assert "but the reference's is" in report.difference.note


def test_sampled_requests_of_v1_and_mrv2_follow_a() -> None:
    """Their draws differ, yet inputs and logits agree to the last bit, since b gets a's tokens."""
    for a, b in ((V1, MRV2), (MRV2, V1)):
        with Twin.build(config(a), config(b)) as twin:
            chosen = []
            compared = twin.b.capture.take

            def spy(output: Any, forced: bool, compared: Any = compared, chosen: list[bool] = chosen) -> Any:
                view = compared(output, forced)
                chosen += [c != s[0] for c, s in zip(view.chosen, view.sampled, strict=True) if s]
                return view

            twin.b.capture.take = spy  # type: ignore[method-assign]
            assert twin.run(sampled()).equal
        assert sum(chosen) > len(chosen) / 2, "their own draws were others"


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": dataclasses.replace(MODEL, rms_norm_eps=1e-6)}, "model.rms_norm_eps is 1e-05 in a and 1e-06 in b"),
        ({"cache": CacheConfig(num_blocks=15, block_size=4)}, "cache.num_blocks is 14 in a and 15 in b"),
        (
            {"scheduler": SchedulerConfig(7, max_model_len=48)},
            "scheduler.max_num_reqs is 6 in a and 7 in b",
        ),
    ],
    ids=["model", "cache", "scheduler"],
)
def test_unlike_configs_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Twin.build(config(), dataclasses.replace(config(), **change))


def test_a_workload_without_an_end_is_given_up() -> None:
    with Twin.build(config(), config()) as twin, pytest.raises(RuntimeError, match="no end after 5 turns"):
        twin.run(greedy(), max_steps=5)


def test_a_twin_that_compared_nothing_is_not_equal() -> None:
    """Every request is aborted in the turn in which it came."""
    with Twin.build(config(V1), config()) as twin:
        report = twin.run(greedy(4), aborts=[(step, step) for step in range(4)])
    assert report.difference is None and report.steps == 0
    assert not report.equal
    assert str(report).endswith("nothing was compared, since no step had tokens")


def test_what_a_twin_refuses(weights: Weights) -> None:
    with pytest.raises(ValueError, match=r"equality must be None or one of \('exact', 'near'\), got 'same'"):
        Twin.build(config(V1), config(), weights=weights, equality="same")  # type: ignore[arg-type]
    with Twin.build(config(V1), config(), weights=weights) as twin:
        with pytest.raises(ValueError, match=r"token id 331 is outside the vocabulary of 331 \(ids 0..330\)"):
            twin.submit("a", [1, 331])
        with pytest.raises(ValueError, match="token id 400 is outside the vocabulary"):
            twin.submit("a", [1], SamplingParams(stop_token_ids=(400,)))
        assert not twin.has_work()


def test_the_class_of_a_pair(weights: Weights) -> None:
    sides = {
        name: make_side(config(runner), weights, name)
        for name, runner in {
            "mrv2": MRV2,
            "threaded": dataclasses.replace(MRV2, stream="threaded"),
            "interpreted": dataclasses.replace(MRV2, kernels="interpret"),
            "two threads": dataclasses.replace(MRV2, threads=2),
            "v1": V1,
            "unordered": V1_UNORDERED,
        }.items()
    }
    exact = {("mrv2", "threaded"), ("mrv2", "v1"), ("threaded", "v1")}
    for one in sides:
        for two in sides:
            same = one == two or (one, two) in exact or (two, one) in exact
            assert equality_of(sides[one], sides[two]) == ("exact" if same else "near"), (one, two)
    for side in sides.values():
        side.close()


# -- the hook ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("runner", ["v1", "mrv2"])
def test_a_runner_goes_on_with_the_token_that_was_forced(runner: Any, async_scheduling: bool) -> None:
    """Both runners' ``force``: before the copy, and before whatever feeds the next step."""
    with Engine(MODEL, runner=runner, device="cpu", async_scheduling=async_scheduling, max_model_len=64) as engine:
        seen: list[list[str]] = []
        engine.rt.register("test.force", lambda sampled: sampled.fill_(123))

        def force(req_ids: list[str], out: torch.Tensor) -> None:
            seen.append(list(req_ids))
            assert out.dtype == torch.int64 and tuple(out.shape) == (len(req_ids), 1)
            engine.rt.run("test.force", out, writes=(out,))

        engine.worker.runner.force = force
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        forced = engine.generate([[1, 2, 3], [4, 5, 6, 7]], params)
        assert [output.token_ids for output in forced] == [[123] * 4] * 2
        assert seen[0] == [output.request_id for output in forced]
        engine.worker.runner.force = None
        # What follows a forced token is what follows it in a prompt.
        after = engine.generate([[1, 2, 3, 123, 123]], params)[0].token_ids
        assert after != [123] * 4
    with Engine(MODEL, runner=runner, device="cpu", async_scheduling=async_scheduling, max_model_len=64) as engine:
        tokens = iter([123, 123])
        engine.rt.register("test.force", lambda sampled, token: sampled.fill_(token))

        def twice(req_ids: list[str], out: torch.Tensor) -> None:
            if (token := next(tokens, None)) is not None:
                engine.rt.run("test.force", out, token, writes=(out,))

        engine.worker.runner.force = twice
        longer = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=6, ignore_eos=True))[0].token_ids
        assert longer == [123, 123, *after]
