"""Structured output through the whole engine: who waits for whom, and that every text conforms.

Where a stub forces an allowed token, it stands for the runner's mask, so that the tokens are the test's choice; the
grammar, the loop and the scheduler are real.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from mrv2lab.engine.engine import Engine
from mrv2lab.observer import EventLog
from mrv2lab.protocol import SamplingParams, StructuredOutput
from tests.engine.worker_stub import Choose, WorkerStub

pytest.importorskip("llguidance")
EOS = 0
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
CHOICE = SamplingParams(max_tokens=12, structured_output=StructuredOutput(choice=("yes", "no")))
JSON = SamplingParams(max_tokens=40, structured_output=StructuredOutput(json_schema=SCHEMA))
PLAIN = SamplingParams(max_tokens=6, ignore_eos=True)
each_loop = pytest.mark.parametrize("loop", ["sync", "async"])


def tiny(loop: str = "async", **options: Any) -> Engine:
    fixed = {"device": "cpu", "num_blocks": 64, "max_num_reqs": 4, "max_model_len": 128}
    return Engine("tiny", async_scheduling=loop == "async", **fixed | options)  # type: ignore[arg-type]


def at_random(seed: int = 0) -> Choose:
    """Any allowed token, the end of the text wherever it is allowed."""
    draw = random.Random(seed)
    return lambda req_id, allowed: EOS if EOS in allowed else draw.choice(allowed)


def finish(engine: Engine) -> None:
    while engine.has_work():
        engine.step()


def conforms(text: str) -> None:
    value = json.loads(text)
    assert list(value) == ["ok", "n"]
    assert isinstance(value["ok"], bool) and 0 <= value["n"] <= 99
    assert text == json.dumps(value)


@each_loop
@pytest.mark.parametrize("runner", ["mrv2", "v1"])
def test_the_text_conforms_and_ends(loop: str, runner: str) -> None:
    with tiny(loop, runner=runner) as engine:
        WorkerStub(engine, choose=at_random())
        outputs = engine.generate(["Once"] * 4, [JSON, CHOICE, PLAIN, JSON])
        for output in (outputs[0], outputs[3]):
            conforms(output.text)
        assert outputs[1].text in ("yes", "no")
        assert [output.finish_reason for output in outputs] == ["stop", "stop", "length", "stop"]
        assert [output.stop_reason for output in outputs] == [EOS, EOS, None, EOS]
        assert outputs[0].token_ids[-1] == EOS and EOS not in outputs[0].token_ids[:-1]


@each_loop
@pytest.mark.parametrize("runner", ["mrv2", "v1"])
def test_the_runners_own_mask(loop: str, runner: str) -> None:
    """No stub: a model of stories has no other way to write JSON."""
    params = [replace(JSON, temperature=1.0, seed=seed) for seed in range(3)]
    with tiny(loop, runner=runner) as engine:
        *outputs, choice = engine.generate(["Once"] * 4, [*params, replace(CHOICE, min_tokens=10)])
        for output in outputs:
            conforms(output.text)
        assert choice.text in ("yes", "no"), "a text that is complete ends before min_tokens"


@each_loop
def test_others_are_not_touched(loop: str) -> None:
    with tiny(loop) as engine:
        alone = engine.generate("Once upon a time", PLAIN)[0].token_ids
    with tiny(loop) as engine:
        WorkerStub(engine, choose=at_random())
        assert engine.generate(["Once upon a time", "Once"], [PLAIN, JSON])[0].token_ids == alone


def test_sampling_waits_for_the_step_before_only_where_it_must() -> None:
    """execute, then the step before, then the mask and sampling; behind the structured request all is as ever."""
    with tiny() as engine:
        stub = WorkerStub(engine, choose=at_random())
        engine.observer = log = EventLog()
        engine.submit("Once", PLAIN, request_id="p")
        engine.step()
        engine.submit("Once", CHOICE, request_id="c")
        finish(engine)
        steps = len(engine.output("c").token_ids)
    assert engine.output("c").text in ("yes", "no") and 2 <= steps <= 3
    expected = ["execute 0", "sample 0", "execute 1", "sample 1 with c", "fetch 0"]  # its first token waits for nothing
    for step in range(2, steps + 1):
        expected += [f"execute {step}", f"fetch {step - 1}", f"sample {step} with c"]
    # The end of the text shows when the last structured step has been settled, in the middle of the next one.
    expected += [f"execute {steps + 1}", f"fetch {steps}", f"sample {steps + 1}"]
    assert stub.log[: len(expected)] == expected
    assert "with" not in "".join(stub.log[len(expected) :])
    deferred = [value for name, value in log.gauges if name == "deferred_sampling"]
    assert deferred == [0] + [1] * steps
    assert engine.scheduler.stats.wasted_rows == 1


def test_the_synchronous_loop_never_waits_twice() -> None:
    with tiny("sync") as engine:
        stub = WorkerStub(engine, choose=at_random())
        engine.observer = log = EventLog()
        engine.generate("Once", CHOICE)
        assert stub.log[:4] == ["execute 0", "sample 0 with r0", "fetch 0", "execute 1"]
        assert {value for name, value in log.gauges if name == "deferred_sampling"} == {0}


def test_without_structured_requests_there_is_no_gauge() -> None:
    with tiny() as engine:
        engine.observer = log = EventLog()
        engine.generate("Once", PLAIN)
        assert "deferred_sampling" not in {name for name, _ in log.gauges}


def test_mutant_a_mask_made_too_early_lets_misfits_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the wait the mask is that of the token before."""
    monkeypatch.setattr("mrv2lab.engine.grammar.Grammars.waiting", staticmethod(lambda followers, schedule: False))
    with tiny() as engine:
        WorkerStub(engine, choose=at_random())
        output = engine.generate("Once", JSON)[0]
        assert output.finish_reason == "error"
        assert "left its grammar" in output.error


@each_loop
def test_a_chunk_of_the_prompt_has_no_mask(loop: str) -> None:
    with tiny(loop, max_num_batched_tokens=4) as engine:
        stub = WorkerStub(engine, choose=at_random())
        output = engine.generate([list(range(20, 30))], CHOICE)[0]
        assert output.text in ("yes", "no")
        assert [line for line in stub.log if line.startswith("sample")][:3] == [
            "sample 0", "sample 1", "sample 2 with r0",
        ]  # fmt: skip


@each_loop
def test_preemption_keeps_the_place_in_the_grammar(loop: str) -> None:
    """By a dry pool, and by hand right behind a launch, so that the token in flight comes back stale."""
    with tiny(loop, enable_prefix_caching=False) as engine:
        stub = WorkerStub(engine, choose=at_random(3))
        names = [engine.submit([40 + i] * 6, JSON) for i in range(3)]
        turns = 0
        while engine.has_work():
            engine.step()
            turns += 1
            running = [request.req_id for request in engine.scheduler.running]
            if turns % 3 == 0 and running:
                engine.scheduler.preempt(running[turns % len(running)])
        assert engine.scheduler.stats.num_preemptions > 5
        for name in names:
            conforms(engine.output(name).text)
        # One mask a token that counts, and what was forced came out: no token was sampled twice under one mask.
        assert len(stub.masks) == sum(len(engine.output(name).token_ids) for name in names)


def test_abort_and_the_same_id_again() -> None:
    """The first life's step is in flight when the second begins: its token belongs to nobody."""
    with tiny() as engine:
        WorkerStub(engine, choose=at_random(1))
        for _ in range(4):
            engine.submit("Once", JSON, request_id="x")
            for _ in range(4):
                engine.step()
            engine.abort("x")
        engine.submit("Once", CHOICE, request_id="x")
        finish(engine)
        assert engine.output("x").text in ("yes", "no")
        assert not engine.grammars._followers


@each_loop
def test_a_token_that_its_mask_forbids_fails_its_request_alone(loop: str) -> None:
    choose = at_random()
    with tiny(loop) as engine:
        WorkerStub(engine, choose=lambda req_id, allowed: 5 if req_id == "bad" else choose(req_id, allowed))
        engine.submit("Once", JSON, request_id="bad")
        engine.submit("Once", JSON, request_id="good")
        finish(engine)
        bad, good = engine.output("bad"), engine.output("good")
        assert (bad.finish_reason, bad.token_ids) == ("error", [5])
        assert "the output left its grammar" in bad.error
        conforms(good.text)
        assert engine.scheduler.kv.pool.num_free == engine.scheduler.kv.pool.num_usable


def test_reset_forgets_the_grammars() -> None:
    with tiny() as engine:
        engine.submit("Once", JSON)
        engine.reset()
        assert not engine.grammars._followers and engine.core.grammars is engine.grammars


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "invalid": ({"regex": "("}, "structured_output.regex is invalid: .*unclosed"),
    "nothing": ({"json_schema": "false"}, "structured_output.json_schema allows nothing"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_grammar_is_refused_at_submit(case: str) -> None:
    wanted, words = REFUSED[case]
    with tiny() as engine, pytest.raises(ValueError, match=words):
        engine.submit("Once", SamplingParams(structured_output=StructuredOutput(**wanted)))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"ignore_eos": True}, "ignore_eos contradicts structured_output"),
        ({"allowed_token_ids": (5, 6)}, r"structured_output contradicts allowed_token_ids: none of .* is left \(\["),
        ({"allowed_token_ids": (78, 89)}, r"contradicts allowed_token_ids: the end-of-text token \[0\] must be possib"),
        ({"bad_words": ((0,),)}, r"structured_output contradicts bad_words: the end-of-text token \[0\]"),
        ({"bad_words": ((78,), (89,), (1149,))}, r"contradicts bad_words: none of .* is left \(\[78, 89, 1149\]\)"),
    ],
)
def test_contradictions_are_named(more: dict[str, Any], words: str) -> None:
    params = SamplingParams(structured_output=StructuredOutput(choice=("yes", "no")), **more)
    with tiny() as engine, pytest.raises(ValueError, match=words):
        engine.submit("Once", params)
