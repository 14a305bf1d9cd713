"""Golden vectors A1 and A2 of reference/mrv2.md (A3 is in test_slot_mapping.py)."""

import pytest
import torch

from mrv2lab.ops.combine_tokens import combine_tokens
from mrv2lab.ops.expand_idx_mapping import expand_idx_mapping
from mrv2lab.ops.num_sampled import num_sampled_and_rejected
from mrv2lab.ops.pos_seq_lens import pos_seq_lens
from mrv2lab.ops.post_update import post_update
from mrv2lab.ops.prefill_inputs import prefill_inputs
from tests.ops.backends import BACKENDS, poisoned, run


def int32(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a1_mixed_batch(backend: str) -> None:
    """Row 2 decodes with two drafts, row 5 prefills a whole prompt; one draft is rejected."""
    # State: R = 6, L = 8, K = 2; rows nobody uses are poisoned.
    all_token_ids = poisoned(6, 8)
    all_token_ids[2, :5] = int32(1, 2, 3, 4, 77)
    all_token_ids[5, :4] = int32(10, 11, 12, 13)
    prefill_len, total_len, num_computed = poisoned(6), poisoned(6), poisoned(6)
    prefill_len[[2, 5]], total_len[[2, 5]], num_computed[[2, 5]] = int32(3, 4), int32(5, 4), int32(4, 0)
    last_sampled, drafts = poisoned(6, dtype=torch.int64), poisoned(6, 2, dtype=torch.int64)
    last_sampled[2], drafts[2] = 77, torch.tensor([80, 81])
    next_prefill = poisoned(1, 6)
    # The step: order [B, A].
    idx_mapping, query_start_loc, cu_num_logits = int32(2, 5), int32(0, 3, 7, 7, 7, 7, 7), int32(0, 3, 4)
    input_ids, positions, seq_lens = poisoned(8), poisoned(8, dtype=torch.int64), poisoned(6)
    logits_indices, expanded, local_pos = poisoned(4, dtype=torch.int64), poisoned(4), poisoned(4)

    run(
        prefill_inputs,
        (idx_mapping, query_start_loc, all_token_ids, prefill_len, num_computed, input_ids, next_prefill, 2),
        backend,
    )
    run(pos_seq_lens, (idx_mapping, query_start_loc, num_computed, positions, seq_lens, 2), backend)
    run(
        combine_tokens,
        (
            idx_mapping,
            query_start_loc,
            cu_num_logits,
            seq_lens,
            prefill_len,
            last_sampled,
            drafts,
            input_ids,
            logits_indices,
            2,
        ),
        backend,
    )
    run(expand_idx_mapping, (idx_mapping, cu_num_logits, expanded, local_pos, 2), backend)
    assert positions[:7].tolist() == [4, 5, 6, 0, 1, 2, 3]
    assert seq_lens.tolist() == [7, 4, 0, 0, 0, 0]
    assert input_ids[:7].tolist() == [77, 80, 81, 10, 11, 12, 13]
    assert logits_indices.tolist() == [0, 1, 2, 6]
    assert expanded.tolist() == [2, 2, 2, 5]
    assert local_pos.tolist() == [0, 1, 2, 0]
    assert next_prefill[0, 5] == 0

    # 80 is accepted, 81 rejected in favour of 90; A samples 40. -1 is what lies behind the accepted tokens.
    sampled, num_sampled, num_rejected = torch.tensor([[80, 90, -1], [40, -1, -1]]), int32(2, 1), poisoned(2)
    run(
        num_sampled_and_rejected,
        (idx_mapping, seq_lens, cu_num_logits, prefill_len, num_sampled, num_rejected, 2),
        backend,
    )
    assert num_sampled.tolist() == [2, 1]
    assert num_rejected.tolist() == [1, 0]
    run(
        post_update,
        (
            idx_mapping,
            query_start_loc,
            sampled,
            num_sampled,
            num_rejected,
            all_token_ids,
            last_sampled,
            total_len,
            num_computed,
            2,
        ),
        backend,
    )
    assert last_sampled[[2, 5]].tolist() == [90, 40]
    assert total_len[[2, 5]].tolist() == [7, 5]
    assert num_computed[[2, 5]].tolist() == [6, 4]
    assert all_token_ids[2].tolist() == [1, 2, 3, 4, 77, 80, 90, poisoned(1).item()]
    assert all_token_ids[5, :5].tolist() == [10, 11, 12, 13, 40]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a2_chunked_prefill(backend: str) -> None:
    """A prompt of 7 in chunks of 3, 3, 1: only the last one samples."""
    tokens = poisoned(1, 9)
    tokens[0, :7] = torch.arange(20, 27)
    prefill_len, total_len, num_computed, idx_mapping = int32(7), int32(7), int32(0), int32(0)
    last_sampled, next_prefill = poisoned(1, dtype=torch.int64), poisoned(1, 1)
    seen = []
    for chunk in (3, 3, 1):
        query_start_loc, cu_num_logits = int32(0, chunk), int32(0, 1)
        input_ids, positions, seq_lens = poisoned(3), poisoned(3, dtype=torch.int64), poisoned(1)
        num_sampled, num_rejected = int32(1), poisoned(1)
        run(
            prefill_inputs,
            (idx_mapping, query_start_loc, tokens, prefill_len, num_computed, input_ids, next_prefill, 1),
            backend,
        )
        run(pos_seq_lens, (idx_mapping, query_start_loc, num_computed, positions, seq_lens, 1), backend)
        assert input_ids[:chunk].tolist() == [20 + position for position in positions[:chunk].tolist()]
        run(
            num_sampled_and_rejected,
            (idx_mapping, seq_lens, cu_num_logits, prefill_len, num_sampled, num_rejected, 1),
            backend,
        )
        run(
            post_update,
            (
                idx_mapping,
                query_start_loc,
                torch.tensor([[50]]),
                num_sampled,
                num_rejected,
                tokens,
                last_sampled,
                total_len,
                num_computed,
                1,
            ),
            backend,
        )
        seen.append((seq_lens.item(), num_sampled.item(), num_rejected.item(), next_prefill.item()))
    assert seen == [(3, 0, 0, 23), (6, 0, 0, 26), (7, 1, 0, 0)]
    assert (total_len.item(), num_computed.item(), last_sampled.item(), tokens[0, 7].item()) == (8, 7, 50, 50)
