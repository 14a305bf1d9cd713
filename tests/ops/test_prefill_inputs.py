import pytest
import torch

from mrv2lab.ops.prefill_inputs import prefill_inputs
from tests.ops.backends import BACKENDS, CPU_BACKENDS, Apply, caught, expect, implementation, mutant, poisoned
from tests.ops.batches import random_batch


def check(apply: Apply, num_reqs: int = 5, lookahead: int = 3, seed: int = 0, pin: bool = False) -> None:
    b = random_batch(num_reqs, seed)
    input_ids, ahead = poisoned(b.num_tokens + 5), poisoned(lookahead, b.num_rows)
    want_ids, want_ahead = input_ids.clone(), ahead.clone()
    for i, row in enumerate(b.idx_mapping.tolist()):
        prompt = b.all_token_ids[row, : b.prefill_len[row]].tolist()
        rest = prompt[b.num_computed_tokens[row] :]
        if not rest:
            continue
        slots = range(int(b.query_start_loc[i]), int(b.query_start_loc[i + 1]))
        for slot in slots:
            if rest:
                want_ids[slot] = rest.pop(0)
        for j in range(lookahead):
            want_ahead[j, row] = rest[j] if j < len(rest) else 0
    expect(
        prefill_inputs,
        apply,
        {"input_ids": want_ids, "next_prefill_tokens": want_ahead},
        idx_mapping=b.idx_mapping,
        query_start_loc=b.query_start_loc,
        all_token_ids=b.all_token_ids.pin_memory() if pin else b.all_token_ids,
        prefill_len=b.prefill_len,
        num_computed_tokens=b.num_computed_tokens,
        input_ids=input_ids,
        next_prefill_tokens=ahead,
        num_reqs=num_reqs,
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_reqs", [1, 3, 7])
def test_equals_brute_force(num_reqs: int, backend: str) -> None:
    check(implementation(prefill_inputs, backend), num_reqs, lookahead=num_reqs % 4, seed=num_reqs)


@pytest.mark.gpu
def test_tokens_in_pinned_memory() -> None:
    check(implementation(prefill_inputs, "triton"), num_reqs=7, pin=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_chunk_of_several_blocks(backend: str) -> None:
    prompt = torch.arange(2500, dtype=torch.int32).view(1, -1)
    expect(
        prefill_inputs,
        implementation(prefill_inputs, backend),
        {"input_ids": range(3, 2203), "next_prefill_tokens": [[2203], [2204]]},
        idx_mapping=torch.zeros(1, dtype=torch.int32),
        query_start_loc=torch.tensor([0, 2200], dtype=torch.int32),
        all_token_ids=prompt,
        prefill_len=torch.tensor([2500], dtype=torch.int32),
        num_computed_tokens=torch.tensor([3], dtype=torch.int32),
        input_ids=poisoned(2200),
        next_prefill_tokens=poisoned(2, 1),
        num_reqs=1,
    )


MUTANTS = {
    "spec": [
        ("min(done + end - start, known)", "done + end - start"),
        ("next_prefill_tokens[:, row] = 0", "pass"),
        ("if done < known:", "if True:"),
    ],
    "interpret": [
        ("tl.minimum(end - start, known - done)", "end - start"),
        ("mask=wanted & (position < known)", "mask=wanted"),
        ("ahead * next_stride + row", "ahead * next_stride + i"),
    ],
}


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("bug", range(3))
def test_mutants_are_caught(backend: str, bug: int, tmp_path) -> None:
    assert caught(check, implementation(mutant(prefill_inputs, *MUTANTS[backend][bug], tmp_path), backend))
