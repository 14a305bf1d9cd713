import numpy as np
import pytest
import torch

from mrv2lab.ops.post_update import post_update, post_update_num_computed
from tests.ops.backends import BACKENDS, CPU_BACKENDS, Apply, caught, expect, implementation, mutant
from tests.ops.batches import random_batch


def check(apply: Apply, num_reqs: int = 7, num_drafts: int = 2, seed: int = 0, pin: bool = False) -> None:
    b = random_batch(num_reqs, seed, num_drafts)
    rng = np.random.default_rng(seed)
    sampled_tokens = torch.tensor(rng.integers(0, 1000, (num_reqs, num_drafts + 1)))
    sampled, rejected = [], []
    tokens, last = b.all_token_ids.clone(), b.last_sampled_tokens.clone()
    total, computed = b.total_len.clone(), b.num_computed_tokens.clone()
    idx_mapping = b.idx_mapping.clone()
    for i, row in enumerate(b.idx_mapping.tolist()):
        num_logits = int(b.cu_num_logits[i + 1] - b.cu_num_logits[i])
        unfinished = b.seq_lens[i] < b.prefill_len[row]
        sampled.append(0 if unfinished else int(rng.integers(1, num_logits + 1)))
        rejected.append(0 if unfinished else num_logits - sampled[-1])
        if i == 4:  # aborted since
            idx_mapping[i] = -1
            continue
        for token in sampled_tokens[i, : sampled[-1]].tolist():
            tokens[row, total[row]] = token
            last[row] = token
            total[row] += 1
        computed[row] = b.seq_lens[i] - rejected[-1]
        assert unfinished or computed[row] == total[row] - 1  # the master invariant
    expect(
        post_update,
        apply,
        {
            "all_token_ids": tokens,
            "last_sampled_tokens": last,
            "total_len": total,
            "num_computed_tokens": computed,
        },
        idx_mapping=idx_mapping,
        query_start_loc=b.query_start_loc,
        sampled_tokens=sampled_tokens,
        num_sampled=torch.tensor(sampled, dtype=torch.int32),
        num_rejected=torch.tensor(rejected, dtype=torch.int32),
        all_token_ids=b.all_token_ids.pin_memory() if pin else b.all_token_ids,
        last_sampled_tokens=b.last_sampled_tokens,
        total_len=b.total_len,
        num_computed_tokens=b.num_computed_tokens,
        num_reqs=num_reqs,
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_drafts", [0, 2, 5])
@pytest.mark.parametrize("num_reqs", [1, 3, 7])
def test_equals_brute_force(num_reqs: int, num_drafts: int, backend: str) -> None:
    check(implementation(post_update, backend), num_reqs, num_drafts, seed=3 + num_drafts)


@pytest.mark.gpu
def test_tokens_in_pinned_memory() -> None:
    check(implementation(post_update, "triton"), pin=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_past_the_row_do_not_reach_the_next_row(backend: str) -> None:
    int32 = {"dtype": torch.int32}
    expect(
        post_update,
        implementation(post_update, backend),
        {
            "all_token_ids": [[1, 2, 3, 70], [5, 6, 7, 8]],
            "last_sampled_tokens": [72, 8],
            "total_len": [6, 4],
            "num_computed_tokens": [5, 3],
        },
        idx_mapping=torch.tensor([0], **int32),
        query_start_loc=torch.tensor([0, 3], **int32),
        sampled_tokens=torch.tensor([[70, 71, 72]]),
        num_sampled=torch.tensor([3], **int32),
        num_rejected=torch.tensor([0], **int32),
        all_token_ids=torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]], **int32),
        last_sampled_tokens=torch.tensor([3, 8]),
        total_len=torch.tensor([3, 4], **int32),
        num_computed_tokens=torch.tensor([2, 3], **int32),
        num_reqs=1,
    )


def check_num_computed(apply: Apply, num_reqs: int = 3, seed: int = 0) -> None:
    b = random_batch(num_reqs, seed)
    idx_mapping, want = b.idx_mapping.clone(), b.num_computed_tokens.clone()
    for i, row in enumerate(b.idx_mapping.tolist()):
        if i == 1:
            idx_mapping[i] = -1
        else:
            want[row] = b.seq_lens[i]
    expect(
        post_update_num_computed,
        apply,
        {"num_computed_tokens": want},
        idx_mapping=idx_mapping,
        query_start_loc=b.query_start_loc,
        num_computed_tokens=b.num_computed_tokens,
        num_reqs=num_reqs,
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_reqs", [1, 3, 7, 200])
def test_num_computed_equals_brute_force(num_reqs: int, backend: str) -> None:
    check_num_computed(implementation(post_update_num_computed, backend), num_reqs)


MUTANTS = {
    "spec": [
        ("sampled_tokens[i, k - 1]", "sampled_tokens[i, -1]"),
        ("        if row < 0:\n            continue\n", ""),
        (" - num_rejected[i]", ""),
    ],
    "interpret": [
        ("tl.load(sampled + k - 1)", "tl.load(sampled)"),
        ("mask = (j < k) &", "mask = (j < 1) &"),
        (" - tl.load(num_rejected + i)", ""),
    ],
}


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("bug", range(3))
def test_mutants_are_caught(backend: str, bug: int, tmp_path) -> None:
    assert caught(check, implementation(mutant(post_update, *MUTANTS[backend][bug], tmp_path), backend))


MUTANTS_NUM_COMPUTED = {
    "spec": ("query_start_loc[i + 1] - query_start_loc[i]\n\n", "query_start_loc[i + 1]\n\n"),
    "interpret": ("computed + query_len, mask=live", "computed + query_len - 1, mask=live"),
}


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_mutants_of_num_computed_are_caught(backend: str, tmp_path) -> None:
    buggy = mutant(post_update_num_computed, *MUTANTS_NUM_COMPUTED[backend], tmp_path)
    assert caught(check_num_computed, implementation(buggy, backend))
