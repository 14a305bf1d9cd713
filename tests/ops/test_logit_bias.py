"""Allowed ids, bias, min_tokens: the order, the barriers (mrv2.md 35), EOS (36), grammars that allow only the end."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mrv2lab.ops.logit_bias import logit_bias
from tests.ops.backends import BACKENDS, CPU_BACKENDS, Apply, caught, compile_for_gpu, implementation, mutant
from tests.ops.floats import randn
from tests.ops.test_count_tokens import int32
from tests.sample import oracle

INF = float("inf")
A, S = 16, 8


def tables(*rows: dict, columns: int = A) -> tuple[torch.Tensor, ...]:
    """edits, allowed ids, bias ids, bias values, stop ids of {allowed, bias, stops, min_len, keep}; stale behind."""
    r = len(rows)
    edits, allowed, bias = np.zeros((r, 5), int), np.full((r, columns), 2), np.full((r, columns), 2)
    values, stops = np.full((r, columns), 99.0), np.full((r, S), 2)
    for i, row in enumerate(rows):
        a, b, s = row.get("allowed") or (), row.get("bias") or {}, row.get("stops") or ()
        edits[i] = len(a), len(b), len(s), row.get("min_len", 0), row.get("keep", 0)
        allowed[i, : len(a)], bias[i, : len(b)], stops[i, : len(s)] = list(a), list(b), list(s)
        values[i, : len(b)] = list(b.values())
    return int32(edits), int32(allowed), int32(bias), torch.tensor(values, dtype=torch.float32), int32(stops)


def check_by_hand(apply: Apply) -> None:
    rows = [
        {},
        {"allowed": [3, 0, 9]},  # 9 is outside the vocabulary, as are all the nines
        {"bias": {1: 5.0, 9: 1.0}},
        {"allowed": [1], "bias": {1: 2.0, 0: 5.0}},
        {"stops": [0, 3, 9], "min_len": 8},
        {"stops": [0], "min_len": 7},
        {"allowed": [2, 3], "stops": [2, 3], "min_len": 8, "keep": 1},
        {"allowed": [2, 3], "stops": [2, 3], "min_len": 8},
        {"stops": [0, 3], "min_len": 8, "keep": 1},
    ]
    n = len(rows)
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]]).repeat(n + 1, 1)
    # All logits rows were produced by the token at position 6, but the one before it lies at 5.
    apply(logits, int32([*range(n), -1]), torch.tensor([5, 6]), torch.ones(n + 1, dtype=torch.int64), *tables(*rows))
    assert logits.tolist() == [
        [1, 2, 3, 4],
        [1, -INF, -INF, 4],
        [1, 7, 3, 4],
        [-INF, 4, -INF, -INF],  # bias adds to what is allowed and raises nothing from -inf
        [-INF, 2, 3, -INF],
        [1, 2, 3, 4],  # position 6 + 1 = 7 is not below 7
        [-INF, -INF, 3, 4],
        [-INF] * 4,
        [-INF, 2, 3, -INF],
        [1, 2, 3, 4],
    ]


def check(apply: Apply, vocab: int = 5000, columns: int = A, seed: int = 0) -> None:
    """All at once on random rows, -inf among the logits, through a strided view, two logits rows of one request."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(4):
        some = min(vocab, columns)
        rows.append(
            {
                "allowed": rng.permutation(vocab)[: rng.integers(1, some + 1)].tolist() if i % 2 else None,
                "bias": {token: rng.normal(0, 50) for token in rng.permutation(vocab)[:some].tolist()},
                "stops": rng.permutation(vocab)[: min(vocab, S)].tolist() if i != 1 else (),
                "min_len": 12,
                "keep": int(i == 3),
            }
        )
    mapping, positions = [2, 2, 1, 0, -1, 3], [9, 10, 11, 30, 0, 5]
    whole = randn(len(mapping), vocab + 3, seed=seed) * 4
    whole[:, 1 + vocab // 2] = -INF
    before = whole.clone()
    indices = torch.tensor([5, 4, 3, 2, 1, 0])
    made = tables(*rows, columns=columns)
    apply(whole[:, 1 : vocab + 1], int32(mapping), torch.tensor(positions[::-1]), indices, *made)
    for i, index in enumerate(mapping):
        if index >= 0:
            row, x = rows[index], before[i, 1 : vocab + 1].double().numpy()
            x = oracle.bias(oracle.allowed(x, row["allowed"]), row["bias"])
            want = torch.from_numpy(oracle.min_tokens(x, row["stops"], positions[i], 12, bool(row["keep"])))
            got = whole[i, 1 : vocab + 1].double()
            assert torch.equal(got == -INF, want == -INF)
            assert torch.allclose(got, want, rtol=1e-6, atol=1e-5)
            before[i, 1 : vocab + 1] = whole[i, 1 : vocab + 1]
    assert torch.equal(whole, before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_by_hand(backend):
    check_by_hand(implementation(logit_bias, backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("vocab", "columns"), [(1, 16), (7, 16), (5000, 16), (5000, 1024)])
def test_logit_bias(backend, vocab, columns):
    check(implementation(logit_bias, backend), vocab, columns, seed=vocab)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_is_nothing_that_is_left(backend):
    logits = torch.tensor([[float("nan"), 3.0, -INF]])
    row = {"stops": [1], "min_len": 9, "keep": 1}
    zero = torch.zeros(1, dtype=torch.int64)
    implementation(logit_bias, backend)(logits, int32([0]), zero, zero, *tables(row))
    assert logits[0, 1] == 3


def check_35(apply: Apply) -> None:
    """allow {3}, V = 50k: logit 3 unchanged, the rest -inf, 1,000 times."""
    logits = randn(1000, 50_000)
    want = torch.full_like(logits, -INF)
    want[:, 3] = logits[:, 3]
    zeros = torch.zeros(1000, dtype=torch.int64)
    apply(logits, zeros.int(), zeros, zeros, *tables({"allowed": [3]}, columns=1024))
    assert torch.equal(logits, want)


@pytest.mark.gpu
def test_35_a_thousand_times():
    check_35(implementation(logit_bias, "triton"))


@pytest.mark.parametrize("backend", [BACKENDS[0], BACKENDS[2]])
def test_full_size(backend):
    check(implementation(logit_bias, backend), 151_936, 1024)


def barriers(op, folder) -> int:
    zero = torch.zeros(1, dtype=torch.int64)
    args = (torch.zeros(1, 5000), int32([0]), zero, zero, *tables({}, columns=1024))
    return compile_for_gpu(op, args, folder).count("bar.sync")


def test_both_barriers_reach_the_machine(tmp_path):
    """Only a GPU can show the race; but the compiler shows that each barrier of the source is one in the machine."""
    pytest.importorskip("triton")
    full = barriers(logit_bias, tmp_path / "full")
    for i, comment in enumerate(("all are saved before any is filled", "all is filled before any is restored")):
        buggy = mutant(logit_bias, f"tl.debug_barrier()  # {comment}", "pass", tmp_path)
        assert barriers(buggy, tmp_path / str(i)) == full - 1


MUTANTS = {
    "spec": [
        (")]) + 1 < min_len", ")]) < min_len"),
        ("            x.fill_(float(\"-inf\"))\n", ""),
        ("if keep_stops and not", "if not"),
        ("if keep_stops and not", "if keep_stops or not"),
        ("positions[int(logits_indices[row])]", "positions[0]"),
        ("if index < 0:\n            continue", "if index < 0:\n            index = 1"),
        ("known = ids < vocab", "known = ids >= vocab"),
        ("stop_ids[index, :stops]", "stop_ids[index, : stops - 1]"),
    ],
    "interpret": [
        (" + 1 < tl.load(edits + 3)", " < tl.load(edits + 3)"),
        ("tl.store(logits + token, saved, mask=mask)\n        tl.debug_barrier()",
         "tl.store(logits + token, saved + 1, mask=mask)"),
        ("if tl.load(edits + 4) != 0:", "if True:"),
        ("if tl.max(best, axis=0) == float(\"-inf\"):", "if True:"),
        ("tl.load(positions + tl.load(logits_indices + row))", "tl.load(positions)"),
        ("    if index < 0:\n        return\n", "    index = tl.where(index < 0, 1, index)\n"),
        ("logits += row * stride", "logits += row * vocab"),
        ("mask=j < count, other=0)", "mask=j < count - 1, other=0)"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("bug", range(8))
def test_mutants(backend, bug, tmp_path):
    buggy = implementation(mutant(logit_bias, *MUTANTS[backend][bug], tmp_path), backend)

    def all_checks(apply):
        check_by_hand(apply)
        check(apply, vocab=40)

    assert caught(all_checks, buggy)
