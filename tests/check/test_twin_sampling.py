"""What a twin makes of sampling parameters: masks go to both sides, and what comes back beside tokens is compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from mrv2lab.check.compare import Captured, NearReport, Rules, compare_step
from mrv2lab.check.compare_sampling import hold
from mrv2lab.check.twin import Twin, TwinReport
from mrv2lab.check.workloads import MODEL
from mrv2lab.config import CacheConfig, EngineConfig, RunnerConfig, SchedulerConfig
from mrv2lab.protocol import Logprobs, ModelRunnerOutput, SamplingParams
from tests.slow import mostly_slow

VOCAB = MODEL.vocab_size


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def config(runner: str = "mrv2", **options: Any) -> EngineConfig:
    """6 rows, a pool that preempts, chunks of 5."""
    sizes = {"max_num_reqs": 6, "max_num_batched_tokens": 24, "max_model_len": 48, "long_prefill_token_threshold": 5}
    scheduler = SchedulerConfig(**sizes | {"async_scheduling": options.pop("async_scheduling", True)})
    own = {"transfer": "barrier", "reorder": "mrv2"} if runner == "v1" else {}
    made = RunnerConfig(runner=runner, device="cpu", **own | options)  # type: ignore[arg-type]
    return EngineConfig(MODEL, CacheConfig(num_blocks=14, block_size=4), scheduler, made)


def drive(twin: Twin) -> TwinReport:
    while twin.has_work() and twin.difference is None:
        twin.step()
    return twin.report()


# -- a grammar ---------------------------------------------------------------------------------------------------------


class Counting:
    """A matcher as ``engine/grammar.py`` has them: the k-th token must be one of ten that depend on the one before."""

    def __init__(self) -> None:
        self.last, self.num_accepted, self.wrong = 0, 0, 0

    def allowed_now(self) -> list[int]:
        return [(7 * self.last + 31 * step) % VOCAB for step in range(10)]

    def accept(self, tokens: Any) -> None:
        for token in tokens:
            self.wrong += token not in self.allowed_now()
            self.last = token
        self.num_accepted += len(tokens)

    def fill(self, rows: Any, drafts: Any = ()) -> None:
        bits = np.zeros(32 * rows.shape[1], np.uint8)
        bits[self.allowed_now()] = 1
        rows[:] = np.packbits(bits, bitorder="little").view(np.int32)


@pytest.mark.parametrize("async_scheduling", mostly_slow([True, False], 1))
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    ("a", "b", "equality"),
    [("v1", "mrv2", "exact"), ("mrv2", "v1", "exact"), ("mrv2", "mrv2", "exact"), ("mrv2", "mrv2", "near")],
)
def test_masks_go_to_both_sides(a: str, b: str, equality: Any, temperature: float, async_scheduling: bool) -> None:
    """Each token depends on the mask that the one before made, in the asynchronous loop too."""
    sides = (config(kind, async_scheduling=async_scheduling) for kind in (a, b))
    matchers = [Counting() for _ in range(4)]
    with Twin.build(*sides, equality=equality) as twin:
        for i in range(7):
            params = SamplingParams(max_tokens=8, temperature=temperature, ignore_eos=True, logprobs=i, seed=i)
            matcher: Any = matchers[i] if i < 4 else None
            twin.submit(f"r{i}", range(3 + i, 9 + 2 * i), params, matcher=matcher)
        report = drive(twin)
    assert report.equal, str(report)
    assert report.equality == equality and report.stats.num_preemptions
    assert [matcher.num_accepted for matcher in matchers] == [8] * 4
    assert not any(matcher.wrong for matcher in matchers)


def test_a_mask_that_reaches_one_side_alone_is_found() -> None:
    with Twin.build(config("v1"), config()) as twin:
        sample = twin.b.sample
        twin.b.sample = lambda forced, grammar=None: sample(forced)  # type: ignore[method-assign]
        twin.submit("r", [1, 2, 3], SamplingParams(max_tokens=4), matcher=Counting())  # type: ignore[arg-type]
        report = drive(twin)
    assert report.difference is not None and report.difference.tensor == "processed_logits"


# -- errors and NaN ----------------------------------------------------------------------------------------------------


def third_fails(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    if len(ids) == 2:
        raise ValueError("three is too many")
    return logits.mul_(1.5)


@pytest.mark.parametrize("stream", ["deferred", "threaded"])
@pytest.mark.parametrize("equality", ["exact", "near"])
def test_processors_and_their_errors(equality: Any, stream: Any) -> None:
    with Twin.build(config("v1", stream=stream), config(stream=stream), equality=equality) as twin:
        for i in range(5):
            functions = (third_fails,) if i == 1 else ()
            twin.submit(f"r{i}", [1 + i, 2, 3], SamplingParams(max_tokens=6, ignore_eos=True), processors=functions)
        report = drive(twin)
    assert report.equal, str(report)
    assert [len(report.tokens[f"r{i}"]) for i in range(5)] == [6, 2, 6, 6, 6]


@pytest.mark.parametrize("b_counts", [True, False])
def test_nans_are_compared_where_both_count(b_counts: bool) -> None:
    with Twin.build(config("v1", count_nans=True), config(count_nans=b_counts)) as twin:
        for side, name in ((twin.a, "test.a"), (twin.b, "test.b")):
            side.rt.register(name, lambda logits: logits[:, 5:8].fill_(float("nan")))
            poison(side, name)
        counted: list[dict[str, int]] = []
        fetch = twin.b.fetch

        def heard(launched: Any) -> Any:
            output, captured = fetch(launched)
            counted.append(output.num_nans)
            return output, captured

        twin.b.fetch = heard  # type: ignore[method-assign]
        twin.submit("r", [1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True))
        report = drive(twin)
    assert report.equal, str(report)
    assert counted[:3] == [{"r": 3} if b_counts else {}] * 3


def poison(side: Any, name: str) -> None:
    inner = side.capture.model

    class Poisoned:
        forward = inner.forward

        def compute_logits(self, indices: Any, n: int) -> Any:
            logits = inner.compute_logits(indices, n)
            side.rt.run(name, logits, writes=(logits,))
            return logits

    side.capture.model = Poisoned()


# -- one step by hand --------------------------------------------------------------------------------------------------

LOGITS = np.array([[0.0, 1.0, 4.0, 3.0]], np.float32)


def entry(**changes: Any) -> Logprobs:
    x = LOGITS[0] - np.log(np.exp(LOGITS[0]).sum())
    fields = {"token_ids": [[2, 2, 3]], "values": [[x[2], x[2], x[3]]], "ranks": [1]} | changes
    kinds = {"token_ids": np.int32, "values": np.float32, "ranks": np.int32}
    return Logprobs(**{name: np.array(value, kinds[name]) for name, value in fields.items()})


def view(processed: Any = LOGITS, chosen: int = 2, **output: Any) -> Captured:
    made = ModelRunnerOutput(7, ["d"], [[2]], **{"logprobs": entry()} | output)
    return Captured(
        step=7, req_ids=["d"], sampled=[[2]], chosen=[chosen], input_ids=np.array([9]), positions=np.array([4]),
        query_start_loc=np.array([0, 1]), seq_lens=np.array([5]), block_tables=(np.array([[3, 8]]),),
        slot_mappings=(np.array([32]),), logits=LOGITS, logits_indices=np.array([0]),
        processed=np.array(processed, np.float32), output=made,
    )  # fmt: skip


RULES = {
    "alike": Rules("exact", (4,)),
    "exact": Rules("exact", (4,), alike=False),
    "near": Rules("near", (4,)),
}
MAIN = SamplingParams(logprobs=2)
CUT = dataclasses.replace(MAIN, top_p=0.9)


def tensor(b: Captured, rules: str, params: SamplingParams = MAIN, **changes: Any) -> str | None:
    made = dataclasses.replace(RULES[rules], **changes)
    found = compare_step(view(), b, made, {"d": (params, 1)}, NearReport())
    return found.tensor if found is not None else None


@pytest.mark.parametrize("rules", RULES)
def test_the_same_is_the_same(rules: str) -> None:
    assert tensor(view(), rules) is None


@pytest.mark.parametrize(
    ("changes", "noticed"),
    [
        ({"logprobs": entry(ranks=[2])}, ("alike", "exact", "near")),
        ({"logprobs": entry(token_ids=[[2, 2, 1]])}, ("alike", "exact")),
        ({"logprobs": entry(token_ids=[[3, 2, 3]])}, ("alike", "exact", "near")),
        ({"logprobs": entry(values=entry().values + np.float32(1e-6))}, ("alike",)),
        ({"logprobs": entry(values=entry().values + np.float32(1e-3))}, ("alike", "exact", "near")),
        ({"logprobs": None}, ("alike", "exact", "near")),
    ],
    ids=["rank", "second", "chosen", "rounding", "value", "none"],
)
def test_logprobs(changes: dict[str, Any], noticed: tuple[str, ...]) -> None:
    for rules in RULES:
        assert tensor(view(**changes), rules) == ("logprobs" if rules in noticed else None), rules
        assert tensor(view(**changes), rules, logprobs=False) is None
        assert tensor(view(**changes), rules, dataclasses.replace(MAIN, logprobs=None)) is None, "nobody asked"


@pytest.mark.parametrize("name", ["errors", "num_nans", "prompt_logprobs"])
def test_dictionaries(name: str) -> None:
    values: dict[str, Any] = {"errors": "a processor failed", "num_nans": 3, "prompt_logprobs": entry()}
    for rules in RULES:
        assert tensor(view(**{name: {"d": values[name]}}), rules) == name
    assert tensor(view(num_nans={"d": 3}), "exact", nans=False) is None


def test_prompt_logprobs_of_other_values() -> None:
    a, b = (view(prompt_logprobs={"d": entry(values=entry().values + by)}) for by in (0, np.float32(0.1)))
    for rules in RULES.values():
        found = compare_step(a, b, rules, {"d": (MAIN, 1)}, NearReport())
        assert found is not None and found.tensor == "prompt_logprobs"


INF = float("inf")


@pytest.mark.parametrize(
    ("row", "params", "noticed"),
    [
        ([0.0, 1.0, 4.0, 3.0 + 1e-6], MAIN, ("alike",)),
        ([0.0, 1.0, 4.0, 3.1], MAIN, ("alike", "exact", "near")),
        ([0.0, 1.0, 4.0, 3.002], MAIN, ("alike", "exact")),
        ([-INF, 1.0, 4.0, 3.0], MAIN, ("alike", "exact", "near")),
        ([-INF, 1.0, 4.0, 3.0], CUT, ("alike",)),
        ([-INF, -INF, -INF, 3.0], dataclasses.replace(CUT, temperature=1.0), ("alike", "exact")),
        ([-INF, 1.0, 4.0, 3.0], dataclasses.replace(MAIN, temperature=1.0, top_k=3), ("alike", "exact")),
    ],
    ids=["rounding", "value", "near", "mask", "cut of a greedy row", "three tokens", "top-k"],
)
def test_processed_logits(row: list[float], params: SamplingParams, noticed: tuple[str, ...]) -> None:
    for rules in RULES:
        found = tensor(view([row]), rules, params, draws=False)
        assert found == ("processed_logits" if rules in noticed else None), rules


def test_another_choice_behind_another_cut_is_excused_and_counted() -> None:
    report, params = NearReport(), {"d": (CUT, 1)}
    cut = [[-INF, 1.0, -INF, 3.0]]
    assert compare_step(view(), view(cut, chosen=3), RULES["near"], params, report) is None
    assert report.excused == 1
    found = compare_step(view(), view(chosen=3), RULES["near"], params, NearReport())
    assert found is not None and found.tensor == "tokens"


def test_a_penalty_may_move_a_logit_by_its_factor() -> None:
    params = SamplingParams(repetition_penalty=4.0)
    a, b = np.array([1.0, 8.0], np.float32), np.array([1.0 + 3e-3, 8.0], np.float32)
    assert hold(a, b, params, 1.0, RULES["near"]).wrong is None
    assert hold(a, b, SamplingParams(), 1.0, RULES["near"]).wrong is not None
