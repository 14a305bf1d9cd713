import pytest
import torch

from mrv2lab.ops.pos_seq_lens import pos_seq_lens
from tests.ops.backends import BACKENDS, CPU_BACKENDS, Apply, caught, expect, implementation, mutant, poisoned
from tests.ops.batches import random_batch


def check(apply: Apply, num_reqs: int = 3, seed: int = 0) -> None:
    b = random_batch(num_reqs, seed)
    positions, seq_lens = poisoned(b.num_tokens + 9, dtype=torch.int64), poisoned(b.num_rows)
    want_positions, want_seq_lens = positions.tolist(), [0] * b.num_rows
    token = 0
    for i in range(num_reqs):
        position = int(b.num_computed_tokens[b.idx_mapping[i]])
        for _ in range(int(b.query_start_loc[i]), int(b.query_start_loc[i + 1])):
            want_positions[token] = position
            token, position = token + 1, position + 1
        want_seq_lens[i] = position
    expect(
        pos_seq_lens,
        apply,
        {"positions": want_positions, "seq_lens": want_seq_lens},
        idx_mapping=b.idx_mapping,
        query_start_loc=b.query_start_loc,
        num_computed_tokens=b.num_computed_tokens,
        positions=positions,
        seq_lens=seq_lens,
        num_reqs=num_reqs,
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_reqs", [1, 3, 7])
def test_equals_brute_force(num_reqs: int, backend: str) -> None:
    check(implementation(pos_seq_lens, backend), num_reqs, seed=num_reqs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_long_chunk_and_long_tail_take_several_blocks(backend: str) -> None:
    seq_lens, positions = poisoned(1100), poisoned(2100, dtype=torch.int64)
    expect(
        pos_seq_lens,
        implementation(pos_seq_lens, backend),
        {"seq_lens": [2055] + [0] * 1099, "positions": [*range(5, 2055), *positions.tolist()[2050:]]},
        idx_mapping=torch.tensor([1], dtype=torch.int32),
        query_start_loc=torch.tensor([0, 2050], dtype=torch.int32),
        num_computed_tokens=torch.tensor([9, 5], dtype=torch.int32),
        positions=positions,
        seq_lens=seq_lens,
        num_reqs=1,
    )


MUTANTS = {
    "spec": [
        ("seq_lens[num_reqs:] = 0", "seq_lens[num_reqs + 1 :] = 0"),
        ("seq_lens[i] = done + end - start", "seq_lens[i] = done + end"),
        ("num_computed_tokens[idx_mapping[i]]", "num_computed_tokens[i]"),
    ],
    "interpret": [
        ("tl.load(num_computed_tokens + row, ", "tl.load(num_computed_tokens + i, "),
        ("mask=offset < length", "mask=offset <= length"),
        ("range(num_reqs, max_num_reqs, BLOCK)", "range(num_reqs, num_reqs, BLOCK)"),
    ],
}


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("bug", range(3))
def test_mutants_are_caught(backend: str, bug: int, tmp_path) -> None:
    old, new = MUTANTS[backend][bug]
    assert caught(check, implementation(mutant(pos_seq_lens, old, new, tmp_path), backend))
