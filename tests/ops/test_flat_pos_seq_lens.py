import pytest
import torch

from mrv2lab.ops.flat_pos_seq_lens import flat_pos_seq_lens
from mrv2lab.ops.pos_seq_lens import pos_seq_lens
from tests.ops.backends import BACKENDS, CPU_BACKENDS, Apply, caught, expect, implementation, mutant, poisoned
from tests.ops.batches import random_batch


def int64(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_decode_a_chunk_and_nobody(backend: str) -> None:
    """Request 0 decodes at position 9, request 1 computes positions 4, 5 and 6."""
    expect(
        flat_pos_seq_lens,
        implementation(flat_pos_seq_lens, backend),
        {"positions": [9, 4, 5, 6, -7777], "seq_lens": [10, 7, 0]},
        req_indices=int64(0, 1, 1, 1, -7777),
        query_pos=int64(0, 0, 1, 2, -7777),
        num_computed_tokens=int32(9, 4, -7777),
        num_scheduled_tokens=int32(1, 3, -7777),
        positions=poisoned(5, dtype=torch.int64),
        seq_lens=poisoned(3),
        num_tokens=4,
        num_reqs=2,
    )


def check(apply: Apply, num_reqs: int = 5, seed: int = 0, spare_rows: int = 4) -> None:
    """The same as MRV2's op with an identity mapping."""
    b = random_batch(num_reqs, seed, spare_rows=spare_rows)
    lengths = b.query_start_loc.diff()[:num_reqs]
    computed = torch.cat([b.num_computed_tokens[b.idx_mapping], poisoned(b.num_rows - num_reqs)])
    positions, seq_lens = poisoned(b.num_tokens + 9, dtype=torch.int64), poisoned(b.num_rows)
    want_positions, want_seq_lens = positions.clone(), seq_lens.clone()
    identity = torch.arange(num_reqs, dtype=torch.int32)
    pos_seq_lens.execute("spec", (identity, b.query_start_loc, computed, want_positions, want_seq_lens, num_reqs))
    expect(
        flat_pos_seq_lens,
        apply,
        {"positions": want_positions, "seq_lens": want_seq_lens},
        req_indices=torch.arange(num_reqs).repeat_interleave(lengths),
        query_pos=torch.cat([torch.arange(n) for n in lengths.tolist()]),
        num_computed_tokens=computed,
        num_scheduled_tokens=torch.cat([lengths, poisoned(b.num_rows - num_reqs)]).to(torch.int32),
        positions=positions,
        seq_lens=seq_lens,
        num_tokens=b.num_tokens,
        num_reqs=num_reqs,
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("num_reqs", "spare_rows"), [(1, 0), (3, 4), (7, 300)], ids=["one", "few", "several-blocks"])
def test_equals_mrv2s_op(num_reqs: int, spare_rows: int, backend: str) -> None:
    check(implementation(flat_pos_seq_lens, backend), num_reqs, seed=num_reqs, spare_rows=spare_rows)


MUTANTS = {
    "spec": [
        ("seq_lens[num_reqs:] = 0", "seq_lens[num_reqs + 1 :] = 0"),
        ("num_computed_tokens[:num_reqs] + num_scheduled", "num_scheduled_tokens[:num_reqs] + num_scheduled"),
        ("num_computed_tokens[req_indices[:num_tokens]] + query", "num_computed_tokens[0] + query"),
    ],
    "interpret": [
        ("tl.store(seq_lens + i, computed + scheduled, mask=i < max_num_reqs)",
         "tl.store(seq_lens + i, computed + scheduled, mask=live)"),
        # One too few: one too many would follow whatever lies behind the step's tokens out of the table.
        ("token = i < num_tokens", "token = i < num_tokens - 1"),
        ("num_computed_tokens + tl.load(req_indices + i, mask=token, other=0)", "num_computed_tokens + 0 * i"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("bug", range(3))
def test_mutants_are_caught(backend: str, bug: int, tmp_path) -> None:
    old, new = MUTANTS[backend][bug]
    assert caught(check, implementation(mutant(flat_pos_seq_lens, old, new, tmp_path), backend))
