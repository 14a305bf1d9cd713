"""What a step of MRV2 launches and allocates: a stage that nobody uses costs nothing, one that somebody uses launches
only while that request is in the batch, and from the second step of a kind on nothing is allocated."""

from __future__ import annotations

from typing import Any

import pytest

from mrv2lab.engine.engine import Engine
from mrv2lab.observer import EventLog
from mrv2lab.protocol import SamplingParams
from mrv2lab.sample.logit_bias import LogitBias
from tests.engine.small import small_engine

INPUTS = ["pos_seq_lens", "combine_tokens", "gather_block_tables", "slot_mapping", "embed", "final_norm"]
COUNT = ["num_sampled.one", "num_sampled_and_rejected"]
GREEDY = ["argmax_blocks", "reduce_blocks"]
DRAWN = ["gumbel_blocks", "reduce_blocks"]
CUT_DRAWN = ["gumbel_cut_blocks", "reduce_blocks"]
CUT = ["logit_groups", "cut_from_groups", "search_cut"]
ROUND = ["narrow_sums", "narrow_choose"]
NARROW = ["logit_groups", "cut_from_groups", *ROUND, *[*ROUND, "list_near"] * 2, "search_cut"]
LOGPROBS = [*CUT, "topk_ids", "token_logprobs"]

STEPS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "nothing": ({}, [*GREEDY, *COUNT]),
    "a temperature": ({"temperature": 0.7}, [*DRAWN, *COUNT]),
    "allowed ids": ({"allowed_token_ids": (3, 4, 5)}, ["cast_logits", "logit_bias", *GREEDY, *COUNT]),
    "a bias": ({"logit_bias": {3: 2.0}}, ["cast_logits", "logit_bias", *GREEDY, *COUNT]),
    "min_tokens": ({"min_tokens": 9, "stop_token_ids": (9,)}, ["cast_logits", "logit_bias", *GREEDY, *COUNT]),
    "a penalty": ({"presence_penalty": 1}, ["cast_logits", "apply_penalties", *GREEDY, *COUNT, "count_sampled"]),
    "bad words": ({"bad_words": ((3, 4),)}, ["cast_logits", "bad_words", *GREEDY, *COUNT]),
    "a processor": ({"extra_args": {"add": 1}}, ["cast_logits", "output_tokens", "custom.call", *GREEDY, *COUNT]),
    "min_p": (
        {"min_p": 0.1, "temperature": 0.7},
        ["min_p_blocks", "min_p_threshold", *CUT_DRAWN, *COUNT],
    ),
    "top_k": (
        {"top_k": 4, "temperature": 0.7},
        [*CUT, *CUT_DRAWN, *COUNT],
    ),
    "top_k and top_p": (
        {"top_k": 4, "top_p": 0.5, "temperature": 0.7},
        [*CUT, *CUT_DRAWN, *COUNT],
    ),
    "top_p": (
        {"top_p": 0.5, "temperature": 0.7},
        [*NARROW, *CUT_DRAWN, *COUNT],
    ),
    "top_k at temperature 1": ({"top_k": 4, "temperature": 1.0}, [*CUT, *CUT_DRAWN, *COUNT]),
    "top_k and a bias": (
        {"top_k": 4, "logit_bias": {3: 2.0}, "temperature": 0.7},
        ["cast_logits", "logit_bias", *CUT, *CUT_DRAWN, *COUNT],
    ),
    "min_p and top_k": (
        {"top_k": 4, "min_p": 0.1, "temperature": 0.7},
        ["cast_logits", "apply_temperature", "min_p_blocks", "min_p_mask", *CUT, "apply_cut", *DRAWN, *COUNT],
    ),
    "cuts of a greedy request": ({"top_k": 4, "min_p": 0.5, "top_p": 0.5}, [*GREEDY, *COUNT]),
    "logprobs": ({"logprobs": 2}, [*GREEDY, *COUNT, *LOGPROBS]),
    "prompt logprobs, later": ({"prompt_logprobs": 2}, [*GREEDY, *COUNT]),
}
"""By what a request asks for: the launches between the logits of a decode step and its output."""

EVERYTHING: dict[str, Any] = {
    "temperature": 0.5,
    "top_k": 5,
    "top_p": 0.9,
    "min_p": 0.01,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.5,
    "logit_bias": {1: 1.0},
    "allowed_token_ids": tuple(range(40)),
    "bad_words": ((3,), (4, 5)),
    "logprobs": 3,
    "prompt_logprobs": 2,
    "min_tokens": 3,
    "stop_token_ids": (8,),
    "extra_args": {"add": 1},
}


class Add:
    """A custom processor for whoever asks for it."""

    def make(self, params: SamplingParams) -> Any:
        return (lambda ids, logits: logits.add_(1)) if params.extra_args else None


def engine_of(log: EventLog, **options: Any) -> Engine:
    return small_engine(observer=log, logits_processors=[Add()], max_logprobs=-1, **options)


def params(tokens: int = 20, **more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": tokens, "ignore_eos": True} | more)


def step(engine: Engine, log: EventLog) -> list[str]:
    """Names of its launches, without those of the model's layers."""
    log.clear()
    engine.step()
    names = [mark.name for mark in log.marks if mark.kind in ("kernel", "run")]
    return [name for name in names if "layer" not in name]


def check_stage(name: str) -> None:
    """Alone; beside a request that uses nothing; and no longer when it has gone."""
    asked, expected = STEPS[name]
    wanted = [*INPUTS, "logits", *expected, "post_update"]
    log = EventLog()
    with engine_of(log, block_size=64) as engine:  # so that no step brings a block
        engine.submit([1, 2, 3], params(10, **asked))
        for _ in range(4):
            names = step(engine, log)
        assert names == wanted
        engine.submit([4, 5], params(20, temperature=asked.get("temperature", 0.0)))
        for _ in range(3):
            names = step(engine, log)
        assert names == wanted
        for _ in range(8):
            names = step(engine, log)
        plain = STEPS["a temperature" if "temperature" in asked else "nothing"][1]
        assert names == [*INPUTS, "logits", *plain, "post_update"]


@pytest.mark.parametrize("name", STEPS)
def test_a_stage_launches_only_while_it_is_used(name: str) -> None:
    check_stage(name)


def test_a_stage_that_launches_for_nobody_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LogitBias, "used", lambda stage, rows: stage._users.count > 0)
    with pytest.raises(AssertionError):
        check_stage("a bias")  # whose row keeps the flag when its request has gone


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_step_that_uses_nothing_is_what_it_was(temperature: float) -> None:
    """Every mark of a decode step, before a request that uses everything came, and after it went."""
    log = EventLog()
    with engine_of(log) as engine:
        engine.submit([1, 2, 3], params(30, temperature=temperature))
        seen = []
        for number in range(22):
            if number == 6:
                engine.submit([4, 5, 6], params(4, **EVERYTHING))
            names = step(engine, log)
            kinds = [mark.kind for mark in log.marks]
            seen.append((names, {kind: kinds.count(kind) for kind in set(kinds)}))
    assert seen[5] == seen[20]
    assert seen[5][1]["d2h"] == 2  # tokens and their numbers
    assert len(seen[8][0]) > len(seen[5][0]) + 15


# -- memory ------------------------------------------------------------------------------------------------------------


def allocations(engine: Engine) -> list[str]:
    """Names of the buffers that are made from now on, but for the pinned temporaries of copies, which PyTorch's host
    allocator serves from its cache."""
    made: list[str] = []

    def listen(method: str) -> None:
        inner = getattr(engine.rt, method)

        def heard(*args: Any, name: str = "", **kwargs: Any) -> Any:
            if not name.endswith(".tmp"):
                made.append(name or method)
            return inner(*args, name=name, **kwargs)

        vars(engine.rt)[method] = heard

    for method in ("empty", "zeros"):
        listen(method)
    return made


@pytest.mark.parametrize("transfer", ["barrier", "pinned_copy", "uva_pool"])
def test_nothing_is_allocated_in_the_steady_state(transfer: str) -> None:
    """Three requests with everything; then three more of their kind, prompts included."""
    log = EventLog()
    with engine_of(log, transfer=transfer, num_blocks=60) as engine:
        made = allocations(engine)

        def serve() -> None:
            for i in range(3):
                engine.submit([1 + i, 2, 3, 4], params(10, **EVERYTHING))
            while engine.has_work():
                engine.step()

        serve()
        first = list(made)
        assert {"processed_logits", "prompt_bin_mask", "output_bin_counts", "custom.row"} <= set(first)
        made.clear()
        serve()
        assert made == []


def test_a_batch_that_uses_nothing_never_allocates() -> None:
    log = EventLog()
    with engine_of(log) as engine:
        made = allocations(engine)
        engine.generate([[1, 2, 3], [4, 5]], [params(8), params(8, temperature=1.0)])
        assert made == []
