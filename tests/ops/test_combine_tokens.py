import pytest
import torch

from mrv2lab.ops.combine_tokens import combine_tokens
from tests.ops.backends import BACKENDS, CPU_BACKENDS, Apply, caught, expect, implementation, mutant, poisoned
from tests.ops.batches import random_batch


def check(apply: Apply, num_reqs: int = 7, num_drafts: int = 2, seed: int = 0) -> None:
    b = random_batch(num_reqs, seed, num_drafts)
    input_ids, indices = poisoned(b.num_tokens + 5), poisoned(b.num_logits + 3, dtype=torch.int64)
    want_ids, want_indices = input_ids.clone(), indices.clone()
    for i, row in enumerate(b.idx_mapping.tolist()):
        # What the request's sequence holds from the end of its prefill on: its last token, then drafts.
        tokens = [int(b.last_sampled_tokens[row]), *b.draft_tokens[row].tolist()]
        slot, position = int(b.query_start_loc[i + 1]), int(b.seq_lens[i])
        for row_of_logits in range(int(b.cu_num_logits[i + 1]) - 1, int(b.cu_num_logits[i]) - 1, -1):
            slot, position = slot - 1, position - 1
            want_indices[row_of_logits] = slot
            if position >= b.prefill_len[row]:
                want_ids[slot] = tokens[row_of_logits - int(b.cu_num_logits[i])]
    expect(
        combine_tokens,
        apply,
        {"input_ids": want_ids, "logits_indices": want_indices},
        idx_mapping=b.idx_mapping,
        query_start_loc=b.query_start_loc,
        cu_num_logits=b.cu_num_logits,
        seq_lens=b.seq_lens,
        prefill_len=b.prefill_len,
        last_sampled_tokens=b.last_sampled_tokens,
        draft_tokens=b.draft_tokens,
        input_ids=input_ids,
        logits_indices=indices,
        num_reqs=num_reqs,
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_drafts", [0, 1, 4])
@pytest.mark.parametrize("num_reqs", [1, 3, 7])
def test_equals_brute_force(num_reqs: int, num_drafts: int, backend: str) -> None:
    check(implementation(combine_tokens, backend), num_reqs, num_drafts, seed=3 + num_drafts)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("computed", "want"),
    [(2, [1, 1, 51]), (3, [1, 50, 51]), (4, [9, 50, 51])],
    ids=["two prompt tokens left", "prompt tail", "decode"],
)
def test_a_prompt_token_is_never_overwritten(computed: int, want: list[int], backend: str) -> None:
    """Row 64 of reference/mrv2.md 4.6: placeholder drafts pad a step that computes prompt tokens, here 1s of 4."""
    expect(
        combine_tokens,
        implementation(combine_tokens, backend),
        {"input_ids": want, "logits_indices": [0, 1, 2]},
        idx_mapping=torch.tensor([1], dtype=torch.int32),
        query_start_loc=torch.tensor([0, 3], dtype=torch.int32),
        cu_num_logits=torch.tensor([0, 3], dtype=torch.int32),
        seq_lens=torch.tensor([computed + 3], dtype=torch.int32),
        prefill_len=torch.tensor([99, 4], dtype=torch.int32),
        last_sampled_tokens=torch.tensor([8, 9]),
        draft_tokens=torch.tensor([[0, 0], [50, 51]]),
        input_ids=torch.ones(3, dtype=torch.int32),
        logits_indices=poisoned(3, dtype=torch.int64),
        num_reqs=1,
    )


MUTANTS = {
    "spec": [
        (">= prefill_len[row]", "> prefill_len[row]"),
        ("if row >= 0 and seq_lens[i] - num_logits + j >= prefill_len[row]:", "if seq_lens[i] > prefill_len[row]:"),
        ("draft_tokens[row, j - 1]", "draft_tokens[i, j - 1]"),
    ],
    "interpret": [
        ("- num_logits + j >= tl.load(prefill_len + row)", "+ 0 * j > tl.load(prefill_len + row)"),
        ("tl.load(last_sampled_tokens + row)", "tl.load(last_sampled_tokens + i)"),
        ("tl.store(logits_indices + first + j", "tl.store(logits_indices + i + j"),
    ],
}


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("bug", range(3))
def test_mutants_are_caught(backend: str, bug: int, tmp_path) -> None:
    assert caught(check, implementation(mutant(combine_tokens, *MUTANTS[backend][bug], tmp_path), backend))
