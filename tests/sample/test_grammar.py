"""The grammar's mask from host arrays to raw logits: rows by request and draft, order between streams, reuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mrv2lab.ops import grammar_mask as op_file
from mrv2lab.protocol import GrammarOutput, SamplingParams
from mrv2lab.runtime.base import Runtime
from mrv2lab.sample import grammar
from mrv2lab.sample.grammar import GrammarMask
from tests.ops.backends import mutant
from tests.runtime.machines import marks
from tests.sample import oracle
from tests.sample.lives import Life, Lives
from tests.sample.test_penalties import POLICIES

INF = float("inf")
VOCAB = 75


class NoStage:
    def add_request(self, row, request):
        pass

    def apply_staged_writes(self):
        pass


def lives_of(rt: Runtime, policy: str = "uva_pool") -> Lives:
    lives = Lives(rt, lambda _: NoStage(), lambda *_: Life("", SamplingParams(), [1]), vocab=VOCAB, policy=policy)
    for name in "abcd":
        lives.add(Life(name, SamplingParams(), [1, 2]))
    return lives


def mask_of(lives: Lives) -> GrammarMask:
    return GrammarMask(lives.rt, lives.transfers, max_num_logits=12, vocab_size=VOCAB)


def output(rng: np.random.Generator, *req_ids: str, width: int = 3) -> GrammarOutput:
    words = rng.integers(-(2**31), 2**31, (len(req_ids), width, 3))
    return GrammarOutput(list(req_ids), words.astype(np.int32))


def check(rt: Runtime, policy: str = "uva_pool", dtype: torch.dtype = torch.bfloat16) -> None:
    """Several steps in flight over the same buffers: b has two drafts, c one, d no grammar, z is gone."""
    lives = lives_of(rt, policy)
    mask = mask_of(lives)
    rng = np.random.default_rng(0)
    made = []
    for step in range(4):
        context = lives.begin({"a": 1, "b": 3, "c": 2, "d": 1}, {"b": [1, 2], "c": [3]}, step)
        given = output(rng, "c", "z", "a", "b")
        values = torch.from_numpy(rng.normal(size=(7, VOCAB + 2))).to(dtype)
        logits = rt.adopt(values.clone().to(rt.device), "logits")
        mask.apply(logits[:, 1 : VOCAB + 1], given, context.batch.host)
        made.append((context.batch.host, given, values, logits))
        rt.end_step()
        if step % 2:
            (rt.copy if step == 1 else rt.main).synchronize()  # one alone, so that only the events keep order
            rt.synchronize()
    for host, given, values, logits in made:
        want = values.clone()
        row = 0
        for req_id, drafts in zip(host.req_ids, host.num_draft_tokens.tolist(), strict=True):
            for pos in range(drafts + 1):
                if req_id in given.req_ids:
                    words = given.bitmask[given.req_ids.index(req_id), pos]
                    want[row, 1 : VOCAB + 1][torch.from_numpy(~oracle.allowed_by_mask(words, VOCAB))] = -INF
                row += 1
        assert torch.equal(rt.read(logits), want)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_steps_in_flight(rt, policy, dtype):
    check(rt, policy, dtype)


def test_the_host_does_not_wait(cpu):
    lives = lives_of(cpu)
    mask = mask_of(lives)
    context = lives.begin({"a": 1, "b": 1})
    logits = cpu.zeros((2, VOCAB), torch.float32, name="logits")
    mask.apply(logits, output(np.random.default_rng(0), "b"), context.batch.host)
    assert marks(cpu, "synchronize", "implicit_sync") == []
    assert cpu.main.done == 0  # nothing has run


def test_the_kernel_waits_for_the_copy_and_the_next_copy_for_the_kernel(cpu):
    lives = lives_of(cpu)
    mask = mask_of(lives)
    context = lives.begin({"a": 1})
    logits = cpu.zeros((1, VOCAB), torch.float32, name="logits")
    for _ in range(2):
        cpu.observer.marks.clear()
        mask.apply(logits, output(np.random.default_rng(0), "a"), context.batch.host)
        seen = [
            (mark.kind, mark.name, mark.stream)
            for mark in marks(cpu, "h2d", "kernel", "record", "wait_event")
            if "grammar" in mark.name
        ]
        assert seen == [
            ("wait_event", "grammar.masked", "copy"),
            ("h2d", "grammar_bitmask.tmp", "copy"),
            ("h2d", "grammar_mapping.tmp", "copy"),
            ("record", "grammar.uploaded", "copy"),
            ("wait_event", "grammar.uploaded", "main"),
            ("kernel", "grammar_mask", "main"),
            ("record", "grammar.masked", "main"),
        ]


def test_nobody_of_the_batch(cpu):
    lives = lives_of(cpu)
    mask = mask_of(lives)
    context = lives.begin({"a": 1})
    logits = cpu.zeros((1, VOCAB), torch.float32, name="logits")
    cpu.observer.marks.clear()
    mask.apply(logits, output(np.random.default_rng(0), "z"), context.batch.host)
    mask.apply(logits, output(np.random.default_rng(0)), context.batch.host)
    assert cpu.observer.marks == []


@pytest.mark.parametrize(
    ("ids", "shape", "dtype", "message"),
    [
        ("a", (1, 3, 2), np.int32, r"must be int32\[1, 3, 3\] for 1 requests, got int32\[1, 3, 2\]"),
        ("a", (2, 3, 3), np.int32, r"must be int32\[1, 3, 3\]"),
        ("a", (1, 3, 3), np.uint32, r"got uint32"),
        ("ab", (2, 1, 3), np.int32, "request 'b' has 3 logits rows, its grammar's bitmask 1"),
    ],
)
def test_a_mask_that_does_not_fit(cpu, ids, shape, dtype, message):
    lives = lives_of(cpu)
    mask = mask_of(lives)
    context = lives.begin({"a": 1, "b": 3}, {"b": [1, 2]})
    logits = cpu.zeros((4, VOCAB), torch.float32, name="logits")
    with pytest.raises(ValueError, match=message):
        mask.apply(logits, GrammarOutput(list(ids), np.zeros(shape, dtype)), context.batch.host)


def fails(rt: Runtime) -> bool:
    try:
        check(rt)
    except AssertionError:
        return True
    return False


def test_without_the_copys_wait_steps_in_flight_are_wrong(cpu, monkeypatch):
    """The next step's mask overwrites this one's."""
    record = type(cpu.event("x")).record

    def forgetful(event, stream=None):
        if event.name != "grammar.masked":
            record(event, stream)

    monkeypatch.setattr(type(cpu.event("x")), "record", forgetful)
    assert fails(cpu)


def test_without_the_kernels_wait_it_reads_too_early(cpu, monkeypatch):
    wait = type(cpu.main).wait_event

    def hasty(stream, event):
        if event.name != "grammar.uploaded":
            wait(stream, event)

    monkeypatch.setattr(type(cpu.main), "wait_event", hasty)
    assert fails(cpu)


def test_a_mapping_that_is_ignored_is_caught(cpu, tmp_path, monkeypatch):
    buggy = mutant(op_file.grammar_mask, "logits[row, bits == 0]", "logits[0, bits == 0]", tmp_path)
    monkeypatch.setattr(grammar, "grammar_mask", buggy)
    assert fails(cpu)
