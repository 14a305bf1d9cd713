"""The shipped models on text, against Hugging Face: what a learner runs on the first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mrv2lab.engine.engine import Engine
from mrv2lab.engine.workload import Arrival, Workload
from mrv2lab.model.load import CHECKPOINTS
from mrv2lab.protocol import SamplingParams
from tests.equality.compare import NearReport, compare_near, reference_logits
from tests.equality.harness import Trace, run_workload
from tests.equality.make_fixture import TEXTS
from tests.equality.models import hf_model, loaded
from tests.slow import mostly_slow

each_model = pytest.mark.parametrize("model", ["tiny", "tiny-draft"])
TOTAL = NearReport()


def encoded(model: str, text: str) -> list[int]:
    tokenizer = loaded(model).tokenizer
    assert tokenizer is not None
    return tokenizer.encode(text)


def params(index: int, max_tokens: int) -> SamplingParams:
    """Every second request sampled."""
    return SamplingParams(max_tokens=max_tokens, temperature=0.9 * (index % 2), seed=index, ignore_eos=True)


def texts(model: str, *, max_tokens: int = 24, start: int = 8) -> Workload:
    """A burst: each text twice, from its first ``start`` tokens and whole, so greedy and sampled."""
    ids = [encoded(model, text) for text in TEXTS]
    prompts = [part for whole in ids for part in (whole[:start], whole)]
    arrivals = [Arrival(0, tuple(prompt), params(i // 2 + i, max_tokens)) for i, prompt in enumerate(prompts)]
    return Workload(tuple(arrivals), "texts")


def run(model: str, workload: Workload, **options: Any) -> Trace:
    """On a fresh engine, against Hugging Face."""
    with Engine(model, device="cpu", **{"num_blocks": 400, "block_size": 8} | options) as engine:
        trace = run_workload(engine, workload)
    report = compare_near(trace, reference_logits(hf_model(model), trace))
    assert report.excused <= 1 + 0.005 * report.rows, report.excuses
    global TOTAL
    TOTAL += report
    return trace


@each_model
def test_greedy_and_sampled_text(model: str) -> None:
    trace = run(model, texts(model, max_tokens=48))
    assert {p.temperature for p in trace.params.values()} == {0.0, 0.9}
    assert sum(len(tokens) for tokens in trace.tokens.values()) == 8 * 48


@pytest.mark.parametrize("chunk", mostly_slow([3, 1, 16], 1))
@each_model
def test_chunks(model: str, chunk: int) -> None:
    workload = texts(model, max_tokens=12)
    trace = run(model, workload, long_prefill_token_threshold=chunk)
    together = [step for step in trace.steps if len(step.req_ids) > 1]  # one alone takes no chunks
    assert max(count for step in together for count in step.counts) == chunk
    assert any(sampled == () for step in together for sampled in step.sampled)


@pytest.mark.parametrize("loop", mostly_slow(["async", "sync"], 1))
@each_model
def test_a_storm(model: str, loop: str) -> None:
    """Twelve of 8 + 32 tokens in a pool for three: 3 x 5 blocks of 8."""
    ids = [encoded(model, text) for text in TEXTS[1:]]
    prompts = [whole[at : at + 8] for at in (0, 3, 5, 9) for whole in ids]
    assert {len(prompt) for prompt in prompts} == {8}
    workload = Workload(tuple(Arrival(0, tuple(prompt), params(i, 32)) for i, prompt in enumerate(prompts)))
    options = {"async_scheduling": loop == "async", "enable_prefix_caching": False}
    assert run(model, workload, num_blocks=1 + 3 * 5, **options).stats.num_preemptions >= 8


@each_model
def test_prefix_hits(model: str) -> None:
    """One head of 24 tokens, then ends of their own."""
    head, ends = encoded(model, TEXTS[3])[:24], [encoded(model, text)[1:9] for text in TEXTS]
    arrivals = [Arrival(2 * i, (*head, *end), params(i, 16)) for i, end in enumerate(ends)]
    assert run(model, Workload(tuple(arrivals))).stats.prefix_hit_tokens == 3 * 24


@each_model
def test_up_to_the_last_position(model: str) -> None:
    """Both end at the last position that the model was trained for: the whole length of the rotary tables."""
    config = loaded(model).config
    last, words = config.max_position_embeddings, encoded(model, TEXTS[3])
    long = (words * (last // len(words) + 1))[: last - 16]
    assert max(long) < config.vocab_size
    arrivals = [Arrival(0, tuple(long), params(i, 16)) for i in range(2)]
    trace = run(model, Workload(tuple(arrivals)))
    assert trace.steps[-1].positions[-1] == last - 2  # its output is the last token


@each_model
def test_text_is_what_transformers_decodes(model: str) -> None:
    """The tokenizer file, read by us and by transformers."""
    import transformers

    theirs = transformers.AutoTokenizer.from_pretrained(CHECKPOINTS / model, local_files_only=True)
    with Engine(model, device="cpu") as engine:
        outputs = engine.generate(list(TEXTS), [params(i, 24) for i in range(len(TEXTS))])
    for text, output in zip(TEXTS, outputs, strict=True):
        assert output.prompt_token_ids == theirs(text)["input_ids"]
        assert output.text == theirs.decode(output.token_ids, skip_special_tokens=True)


@each_model
def test_greedy_is_what_transformers_generates(model: str) -> None:
    """By ``generate`` with its own cache, alone; up to the first place where the two best are nearly level."""
    prompt = encoded(model, TEXTS[0])
    with Engine(model, device="cpu") as engine:
        (ours,) = engine.generate([prompt], SamplingParams(max_tokens=32))
    theirs = hf_model(model).generate(
        torch.tensor([prompt]), max_new_tokens=32, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    for token, logits in zip(ours.token_ids, theirs.logits, strict=False):
        best, second = logits[0].topk(2).values.tolist()
        if best - second < 1e-3 * abs(best):
            break
        assert token == int(logits[0].argmax())
    else:
        assert ours.token_ids == theirs.sequences[0, len(prompt) :].tolist()


def test_excused() -> None:
    """At most 0.5 % over all of this file that ran."""
    print(f"\n{TOTAL.rows} rows, {TOTAL.excused} excused, worst {TOTAL.worst:.2g}")
    if TOTAL.rows:
        TOTAL.check()
