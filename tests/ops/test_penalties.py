"""Penalties: A9 literally, the float64 oracle, drafts as outputs, placeholders, strides, rows that use none."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mrv2lab.ops.penalties import apply_penalties
from tests.ops.backends import BACKENDS, CPU_BACKENDS, Apply, caught, implementation, mutant
from tests.ops.floats import randn
from tests.ops.test_count_tokens import int32
from tests.sample import oracle

INF = float("inf")


def packed(vocab: int, *prompts: list[int]) -> torch.Tensor:
    """int32[R, ceil(V / 32)]."""
    words = np.zeros((len(prompts), -(-vocab // 32)), np.uint32)
    for row, prompt in enumerate(prompts):
        for token in prompt:
            words[row, token // 32] |= np.uint32(1 << (token % 32))
    return int32(words.view(np.int32))


def counted(vocab: int, *outputs: list[int]) -> torch.Tensor:
    return int32([np.bincount(np.asarray(output, np.int64), minlength=vocab) for output in outputs])


def check_a9(apply: Apply) -> None:
    """logit 2, rho 1.25 => 1.6; -2 => -2.5; then count 3, freq .1, pres .5 => -.8 more. Token 2 is nowhere."""
    logits = torch.tensor([[2.0, -2.0, 2.0]] * 3)
    mapping, zeros, none = int32([0, 1, 2]), int32([0, 0, 0]), torch.zeros(3, dtype=torch.int64)
    rho, frequency, presence = torch.tensor([1.25, 1.25, 1.0]), torch.tensor([0.0, 0.1, 0.1]), torch.tensor([0, 0.5, 0])
    counts = counted(3, [], [0, 0, 0, 1, 1, 1], [1])
    apply(logits, mapping, zeros, none, int32([9]), rho, frequency, presence, packed(3, [0, 1], [], [0]), counts)
    want = [[1.6, -2.5, 2.0], [1.6 - 0.8, -2.5 - 0.8, 2.0], [2.0, -2.1, 2.0]]
    assert torch.allclose(logits, torch.tensor(want), rtol=1e-6)


def check(apply: Apply, vocab: int = 300, rows: int = 3, drafts: int = 2, seed: int = 0) -> None:
    """One request a row of the state, each with 1 + drafts logits rows; row 1 uses nothing, and one row is padding."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, vocab, 9).tolist() for _ in range(rows)]
    outputs = [rng.integers(0, vocab, 30).tolist() for _ in range(rows)]
    parameters = [(1.3, 0.7, -0.4), (1.0, 0.0, 0.0), (0.6, -1.5, 1.0), (1.0, 2.0, 0.0), (1.7, 0, 0)][:rows]
    counts, mask = counted(vocab, *outputs), packed(vocab, *prompts)
    order = rng.permutation(rows)
    ids = np.full(rows * (drafts + 3), 3 % vocab)  # what lies in front of a request's slots belongs to another
    mapping, local, indices, said = [], [], [], []
    for i, row in enumerate(order.tolist()):
        slot = i * (drafts + 3) + 2
        own = [outputs[row][0], *rng.integers(0, vocab, drafts)][:drafts]  # one seen before, others mostly new
        if drafts > 2:
            own[1] = -1  # a placeholder
        ids[slot + 1 : slot + 1 + drafts] = own
        for pos in range(drafts + 1):
            mapping.append(row)
            local.append(pos)
            indices.append(slot + pos)
            said.append(outputs[row] + [int(t) for t in own[:pos]])
    mapping[-1] = -1
    n = len(mapping)
    whole = randn(n, vocab + 3, seed=seed) * 4
    whole[0, 1 : 1 + vocab // 3] = -INF
    before = whole.clone()
    tables = [torch.tensor([p[k] for p in parameters], dtype=torch.float32) for k in range(3)]
    apply(
        whole[:, 1 : vocab + 1], int32(mapping), int32(local), torch.tensor(indices), int32(ids), *tables, mask, counts
    )
    for i, row in enumerate(mapping):
        if row >= 0:
            x = before[i, 1 : vocab + 1].double().numpy()
            want = torch.from_numpy(oracle.penalties(x, prompts[row], said[i], *parameters[row]))
            got = whole[i, 1 : vocab + 1].double()
            assert torch.equal(got == -INF, want == -INF)
            scale = want[want > -INF].abs().amax().item()
            assert torch.allclose(got, want, rtol=1e-6, atol=1e-6 * scale)
            before[i, 1 : vocab + 1] = whole[i, 1 : vocab + 1]
    assert torch.equal(whole, before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a9(backend):
    check_a9(implementation(apply_penalties, backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("drafts", [0, 2, 4])
@pytest.mark.parametrize(("vocab", "rows"), [(7, 1), (1000, 3)])
def test_penalties(backend, vocab, rows, drafts):
    check(implementation(apply_penalties, backend), vocab, rows, drafts, seed=drafts)


def check_quotients(apply: Apply) -> None:
    """x / repetition is rounded once, whatever x: all exponents, zeros, infinity; repetitions far from 1, too."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**31 - 2**23, (7, 2000), dtype=np.int32)
    logits = torch.from_numpy(np.concatenate([bits, rng.integers(2**30 - 2**29, 2**30 + 2**28, (7, 2000), np.int32)]))
    logits = logits.view(torch.float32)
    logits[:7, :3] = torch.tensor([INF, 0.0, 2.0**-149])
    repetition = torch.tensor([1.3, 0.7, 1.0000001, 1.9999999, 1e-30, 1e30, 3.0] * 2)
    counts = torch.zeros(14, 2000, dtype=torch.int32)
    mask = torch.full((14, 63), -1, dtype=torch.int32)
    rows, off = torch.arange(14).int(), torch.zeros(14)
    want = logits / repetition[:, None]
    apply(
        logits, rows, torch.zeros(14).int(), torch.arange(14), torch.zeros(14).int(), repetition, off, off, mask, counts
    )
    assert torch.equal(logits, want)


def needs_fma(backend: str) -> None:
    """Triton 3.6 interprets a fused multiply-add as two operations, which the corrections are not made for."""
    if backend == "interpret":
        interpreter = pytest.importorskip("triton.runtime.interpreter")
        if not hasattr(interpreter._interpreter, "fma_fp32"):
            pytest.skip("this interpreter rounds a multiply-add twice")


@pytest.mark.parametrize("backend", BACKENDS)
def test_quotients(backend):
    needs_fma(backend)
    check_quotients(implementation(apply_penalties, backend))


@pytest.mark.skipif(BACKENDS[1].marks[0].args[0], reason="Triton is not installed")
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("+ far > 0:\n        q", "+ far > 5:\n        q"),
        ("+ far > 0:\n        q", "> 0:\n        q"),
        ("tl.div_rn(1.0, repetition)", "tl.div_rn(1.01, repetition)"),
    ],
    ids=["odd ones too", "far ones too", "a poor reciprocal"],
)
def test_mutants_of_the_quotient(old, new, tmp_path):
    needs_fma("interpret")
    assert caught(check_quotients, implementation(mutant(apply_penalties, old, new, tmp_path), "interpret"))


@pytest.mark.parametrize("backend", [BACKENDS[0], BACKENDS[2]])
@pytest.mark.parametrize("drafts", [0, 4])
def test_full_size(backend, drafts):
    check(implementation(apply_penalties, backend), 151_936, 5, drafts)


MUTANTS = {
    "spec": [
        ("/ repetition, x[seen] * repetition)", "/ repetition, x[seen] / repetition)"),
        ("drafts = ids[last - int(local_pos[row]) : last]", "drafts = ids[last - int(local_pos[row]) - 1 : last]"),
        ("drafts = ids[last - int(local_pos[row]) : last]", "drafts = ids[last:last]"),
        ("drafts[(drafts >= 0) & (drafts < vocab)]", "np.maximum(drafts, 0)"),
        ("        x[count > 0] -= presence\n", "        x[seen] -= presence\n"),
        (" | (np.unpackbits(words, count=vocab, bitorder=\"little\") == 1)", ""),
        ("if index < 0:\n            continue", "if index < 0:\n            index = 0"),
        ("frequency * count[count > 0].astype(np.float32)", "frequency"),
    ],
    "interpret": [
        ("x * repetition)", "tl.div_rn(x, repetition))"),
        ("- drafts + 1\n", "- drafts\n"),
        ("for i in range(drafts):", "for i in range(0):"),
        ("(token == tl.load(input_ids + first + i))", "(token == tl.maximum(tl.load(input_ids + first + i), 0))"),
        ("tl.where(count > 0, x - frequency", "tl.where(seen, x - frequency"),
        ("(count > 0) | in_prompt", "(count > 0) & in_prompt"),
        ("    if index < 0:\n        return\n", "    index = tl.maximum(index, 0)\n"),
        ("count.to(tl.float32)", "1.0"),
    ],
}  # fmt: skip
BUGS = [
    "negative divided", "own token counted", "drafts forgotten", "placeholder counted", "presence for the prompt",
    "prompt forgotten", "padding written", "frequency once",
]  # fmt: skip


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("bug", range(len(BUGS)), ids=BUGS)
def test_mutants(backend, bug, tmp_path):
    buggy = implementation(mutant(apply_penalties, *MUTANTS[backend][bug], tmp_path), backend)

    def all_checks(apply):
        check_a9(apply)
        check(apply)
        check(apply, drafts=4, vocab=7, rows=1)

    assert caught(all_checks, buggy)
