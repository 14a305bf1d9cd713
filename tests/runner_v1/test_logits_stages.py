"""V1's processing of logits: each parameter and all together against the float64 oracle; order; what is launched."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mrv2lab.protocol import StructuredOutput
from mrv2lab.runner_v1 import logits_stages
from mrv2lab.runner_v1.logits_stages import LogitsStages
from tests.runner_v1.sampling import INF, SamplingBench

SHAPES = [
    pytest.param(7, torch.float32, False, id="7"),
    pytest.param(1000, torch.float32, True, id="1000-strided"),
    pytest.param(1000, torch.bfloat16, False, id="1000-bfloat16"),
    pytest.param(49_152, torch.float32, False, id="49152"),
]
EACH: dict[str, dict[str, Any]] = {
    "allowed": {"allowed_token_ids": (0, 3, 5)},
    "bias": {"logit_bias": {2: 5.0, 4: -100.0}},
    "min_tokens": {"min_tokens": 4, "stop": (1, 4)},
    "penalties": {"repetition_penalty": 1.5, "frequency_penalty": 0.7, "presence_penalty": -0.4},
    "repetition": {"repetition_penalty": 0.6},
    "frequency": {"frequency_penalty": -1.1},
    "bad_words": {"bad_words": ((3,), (5, 2), (2, 5, 4), (5, 5, 1))},
    "min_p": {"min_p": 0.1, "temperature": 0.7},
    "top_k": {"top_k": 3, "temperature": 1.3},
    "top_p": {"top_p": 0.8, "temperature": 1.0},
    "top_k_top_p": {"top_k": 4, "top_p": 0.6, "temperature": 1.0},
    "all": {
        "allowed_token_ids": (0, 1, 2, 3, 5),
        "logit_bias": {1: 1.5},
        "min_tokens": 4,
        "stop": (0,),
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.2,
        "bad_words": ((2, 5),),
        "temperature": 0.8,
        "min_p": 0.01,
        "top_k": 4,
        "top_p": 0.9,
    },
}


def random_logits(rows: int, vocab: int, seed: int) -> torch.Tensor:
    """With ties, -inf and, in one row, NaN."""
    made = torch.randn((rows, vocab), generator=torch.Generator().manual_seed(seed)) * 3
    made[:, vocab // 2 :: 3] = made[:, 1:2]
    made[0, vocab - 1] = -INF
    made[-1, vocab - 2] = float("nan")
    return made


@pytest.mark.parametrize(("vocab", "dtype", "strided"), SHAPES)
@pytest.mark.parametrize("name", EACH)
def test_each_parameter_equals_the_oracle(name: str, vocab: int, dtype: torch.dtype, strided: bool) -> None:
    """Beside rows that ask for nothing."""
    bench = SamplingBench(vocab, dtype=dtype, strided=strided)
    bench.add([2, 2, 6], [5])
    bench.add([1, 6], [5, 2, 5], **EACH[name])
    bench.add([4], temperature=1.0)
    bench.check(random_logits(3, vocab, 1))


@pytest.mark.parametrize("seed", range(12))
def test_mixed_batches_equal_the_oracle_while_rows_move(seed: int) -> None:
    """Every parameter at once in random rows that come, go, condense and change places."""
    rng = np.random.default_rng(seed)
    bench = SamplingBench(40)
    for step in range(14):
        if (bench.batch.num_reqs < 8 and rng.random() < 0.7) or not bench.batch.num_reqs:
            bench.add(**random_params(rng, 40))
        elif rng.random() < 0.5 and bench.batch.num_reqs > 1:
            bench.remove(str(rng.choice(bench.batch.req_ids)))
        rows = bench.batch.num_reqs
        bench.batch.swap_states(*rng.integers(0, rows, 2).tolist())
        for state in bench.states.values():
            state.output_token_ids.append(int(rng.integers(0, 40)))
        bench.check(random_logits(rows, 40, 100 * seed + step))


def random_params(rng: np.random.Generator, vocab: int) -> dict[str, Any]:
    some = lambda n: tuple(rng.choice(vocab, n, replace=False).tolist())  # noqa: E731
    choices = {
        "temperature": float(rng.choice([0.5, 1.0, 2.0])),
        "top_k": int(rng.integers(1, vocab + 5)),
        "top_p": float(rng.uniform(0.1, 1.0)),
        "min_p": float(rng.uniform(0.0, 0.3)),
        "repetition_penalty": float(rng.uniform(0.5, 2.0)),
        "frequency_penalty": float(rng.uniform(-2, 2)),
        "presence_penalty": float(rng.uniform(-2, 2)),
        "logit_bias": dict.fromkeys(some(3), 2.5),
        "allowed_token_ids": some(20),
        "min_tokens": int(rng.integers(1, 9)),
        "bad_words": (some(1), some(2)),
    }
    picked = {name: value for name, value in choices.items() if rng.random() < 0.35}
    prompt = rng.integers(0, vocab, int(rng.integers(1, 6))).tolist()
    return picked | {"prompt": prompt, "outputs": [], "stop": some(2)}


# -- rows that teach ---------------------------------------------------------------------------------------------------


def processed(logits: list[float], **params: Any) -> list[float]:
    bench = SamplingBench(len(logits))
    bench.add(**params)
    made: list[float] = bench.step([logits])[0][0].tolist()
    return made


def test_bias_comes_before_the_penalties() -> None:
    """mrv2.md 4.4, 38: (x + 5) / 1.5, not x / 1.5 + 5."""
    made = processed([1.0, 0.0], prompt=[0], logit_bias={0: 5.0}, repetition_penalty=1.5)
    assert made == [4.0, 0.0]


def test_the_golden_penalties() -> None:
    """mrv2.md A9."""
    made = processed([2.0, -2.0, 2.0], prompt=[0, 1], outputs=[2, 2, 2], repetition_penalty=1.25)
    assert made == pytest.approx([1.6, -2.5, 1.6])
    made = processed([2.0, -2.0], outputs=[0, 0, 0], frequency_penalty=0.1, presence_penalty=0.5)
    assert made == pytest.approx([2 - 0.8, -2.0])


def test_the_golden_min_p() -> None:
    """mrv2.md A10: the threshold is -0.3026."""
    assert processed([2.0, 1, 0, -3], temperature=1.0, min_p=0.1) == [2, 1, 0, -INF]


def test_a_stop_token_at_the_earliest_as_token_min_tokens_plus_one() -> None:
    """mrv2.md 4.4, 36."""
    for length in range(7):
        made = processed([0.0, 9.0], outputs=[0] * length, min_tokens=5, stop=(1,))
        assert (made[1] == -INF) == (length < 5)


def test_a_grammar_that_allows_only_the_end_is_stronger_than_min_tokens() -> None:
    logits = [-INF, 2.0, -INF, 1.0]
    structured = {"structured_output": StructuredOutput(regex="a")}
    assert processed(logits, min_tokens=5, stop=(1, 3)) == [-INF] * 4
    assert processed(logits, min_tokens=5, stop=(1, 3), **structured) == logits
    assert processed(logits, min_tokens=5, stop=(1,), **structured) == [-INF, -INF, -INF, 1.0]


def test_bad_words_look_at_outputs_alone() -> None:
    assert processed([0.0] * 3, prompt=[1], bad_words=((1, 2),)) == [0, 0, 0]
    assert processed([0.0] * 3, outputs=[0, 1], bad_words=((1, 2), (0, 1, 1), (1, 0, 0))) == [0, -INF, -INF]
    assert processed([0.0] * 3, outputs=[1], bad_words=((1, 1, 0), (0,))) == [-INF, 0, 0]


def test_allowed_ids_a_thousand_times() -> None:
    """mrv2.md 4.4, 35."""
    bench = SamplingBench(5000)
    bench.add(allowed_token_ids=(3,))
    for _ in range(100):
        (row,), (token,) = bench.step(torch.full((1, 5000), 0.25))
        assert token == 3 and row[3] == 0.25 and np.isneginf(np.delete(row, 3)).all()


def test_nan_is_minus_infinity_and_others_are_unharmed() -> None:
    """mrv2.md 4.4, 49; without any stage, too."""
    nan = float("nan")
    for params in ({}, {"temperature": 1.0}, {"min_p": 0.5, "temperature": 1.0}, {"logit_bias": {0: 0.0}}):
        bench = SamplingBench(4)
        bench.add(**params)
        bench.add()
        tokens = bench.step([[nan, -9.0, 60.0, nan], [1.0, 0.0, 3.0, 2.0]])[1]
        assert tokens == [2, 2], params


def test_a_row_without_a_finite_logit_gives_token_0() -> None:
    for params in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5, "min_p": 0.5, "top_k": 2}):
        bench = SamplingBench(4)
        bench.add(**params)
        bench.add(temperature=1.0, seed=3)
        assert bench.step([[-INF] * 4, [-INF, -INF, 0.0, -INF]])[1] == [0, 2], params


def test_texts_are_no_bad_words() -> None:
    with pytest.raises(ValueError, match="'r0' has bad words as texts; make token ids of them at submit"):
        SamplingBench().add(bad_words=("no",))


# -- launches ----------------------------------------------------------------------------------------------------------


def launches(*requests: dict[str, Any], keeps_shape: bool = False) -> list[str]:
    bench = SamplingBench(20)
    bench.sampler.keeps_shape = keeps_shape
    for params in requests:
        bench.add(**params)
    bench.step(torch.zeros(len(requests), 20))
    log = bench.listen()
    bench.sampler.sample(bench.sampled[: len(requests)], bench.logits[: len(requests)], bench.batch)
    assert log.waits() == []
    return [mark.name.removeprefix("v1.sample.") for mark in log.marks if mark.kind == "run"]


def test_a_stage_that_no_row_uses_launches_nothing() -> None:
    assert launches({}) == ["greedy"]
    assert launches({"temperature": 1.0}, {"logprobs": 3}) == ["random"]
    assert launches({"top_k": 20, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}) == ["random"]
    assert launches({"repetition_penalty": 1.0, "frequency_penalty": 0.0}) == ["greedy"]
    assert launches({"min_tokens": 2, "stop": (1,), "outputs": [3, 3]}) == ["greedy"]
    assert launches({"bad_words": ((1, 2),)}) == ["greedy"], "no output ends like that"
    assert launches({"logit_bias": {1: 1.0}}, {}) == ["float32", "logit_bias", "greedy"]
    assert launches({"top_k": 2}) == ["greedy"], "no argmax changes"
    assert launches({"top_k": 2}, {"temperature": 1.0}) == ["float32", "temperature", "top_k_top_p", "random"]
    assert launches({"min_p": 0.1, "temperature": 1.0}) == ["float32", "temperature", "min_p", "random"]


def test_processed_logprobs_need_whole_logits() -> None:
    assert launches({"top_k": 2, "logprobs": 1}, keeps_shape=True) == ["float32", "top_k_top_p", "greedy"]
    assert launches({"temperature": 2.0, "logprobs": 1}, keeps_shape=True) == ["float32", "temperature", "random"]
    assert launches({"logprobs": 1}, keeps_shape=True) == ["greedy"]


def test_the_order_of_stages() -> None:
    processors = (lambda ids, logits: logits,)
    made = launches(EACH["all"] | {"outputs": [2], "processors": processors, "min_tokens": 9})
    order = "allowed logit_bias min_tokens penalties bad_words custom temperature min_p top_k_top_p"
    assert made == ["float32", *order.split(), "random"]


def test_a_stage_that_says_nothing_changes_no_draw() -> None:
    """The processed way and the plain way draw the same."""

    def tokens(**params: Any) -> list[int]:
        bench = SamplingBench(30)
        bench.add(temperature=0.7, seed=5, **params)
        bench.add(temperature=1.7)
        logits = torch.randn((2, 30), generator=torch.Generator().manual_seed(0))
        return [token for _ in range(20) for token in bench.step(logits)[1]]

    assert tokens() == tokens(logit_bias={3: 0.0}) == tokens(min_p=1e-9)


# -- mutants -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "mutant", "case"),
    [
        ("allowed", lambda x, mask: None, "allowed"),
        ("logit_bias", lambda x, rows, ids, values: x.index_put_((rows, ids), values), "bias"),
        ("min_tokens", lambda x, rows, ids, structured: None, "min_tokens"),
        ("bad_words", lambda x, rows, ids: None, "bad_words"),
        ("temperature", lambda x, t: None, "min_p"),
        ("min_p", lambda x, least: x.masked_fill_(x.softmax(-1) < least[: len(x), None], -INF), "min_p"),
    ],
)
def test_a_wrong_stage_is_found(stage: str, mutant: Any, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(logits_stages._SEGMENTS, stage, mutant)
    with pytest.raises(AssertionError):
        test_each_parameter_equals_the_oracle(case, 1000, torch.float32, False)


def test_temperature_behind_the_cut_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = LogitsStages._shape

    def late(self: LogitsStages, x: Any, batch: Any, metadata: Any) -> None:
        run, later = self._run, []
        self._run = lambda name, *args: later.append(args) if name == "temperature" else run(name, *args)  # type: ignore[method-assign]
        original(self, x, batch, metadata)
        for args in later:
            run("temperature", *args)

    monkeypatch.setattr(LogitsStages, "_shape", late)
    with pytest.raises(AssertionError):
        test_each_parameter_equals_the_oracle("min_p", 7, torch.float32, False)
