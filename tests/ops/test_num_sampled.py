import pytest
import torch

from mrv2lab.ops.num_sampled import num_sampled_and_rejected, num_sampled_without_drafts
from tests.ops.backends import BACKENDS, CPU_BACKENDS, Apply, caught, expect, implementation, mutant, poisoned
from tests.ops.batches import random_batch


def check(apply: Apply, num_reqs: int = 7, seed: int = 0) -> None:
    b = random_batch(num_reqs, seed)
    num_logits = [int(b.cu_num_logits[i + 1] - b.cu_num_logits[i]) for i in range(num_reqs)]
    sampled = [1 + (i + seed) % n for i, n in enumerate(num_logits)]
    unfinished = [int(b.seq_lens[i] < b.prefill_len[row]) for i, row in enumerate(b.idx_mapping.tolist())]
    finished = [1 - flag for flag in unfinished]
    tail = poisoned(5).tolist()
    rejected = [(n - k) * f for n, k, f in zip(num_logits, sampled, finished, strict=True)]
    expect(
        num_sampled_and_rejected,
        apply,
        {
            "num_sampled": [*(k * f for k, f in zip(sampled, finished, strict=True)), *tail],
            "num_rejected": [*rejected, *tail],
        },
        idx_mapping=b.idx_mapping,
        seq_lens=b.seq_lens,
        cu_num_logits=b.cu_num_logits,
        prefill_len=b.prefill_len,
        num_sampled=torch.tensor([*sampled, *tail], dtype=torch.int32),
        num_rejected=poisoned(num_reqs + 5),
        num_reqs=num_reqs,
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_reqs", [1, 3, 7, 128, 300])
def test_equals_brute_force(num_reqs: int, backend: str) -> None:
    check(implementation(num_sampled_and_rejected, backend), num_reqs, seed=num_reqs)


MUTANTS = {
    "spec": [
        ("seq_lens[i] < prefill_len", "seq_lens[i] <= prefill_len"),
        ("num_sampled[i] = num_rejected[i] = 0", "num_sampled[i] = 0"),
    ],
    "interpret": [
        ("row, mask=row >= 0, other=0)\n    unfinished", "i, mask=row >= 0, other=0)\n    unfinished"),
        ("tl.where(unfinished, 0, sampled)", "sampled"),
    ],
}


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("bug", range(2))
def test_mutants_are_caught(backend: str, bug: int, tmp_path) -> None:
    assert caught(check, implementation(mutant(num_sampled_and_rejected, *MUTANTS[backend][bug], tmp_path), backend))


def check_without_drafts(apply: Apply, num_reqs: int = 7, seed: int = 0) -> None:
    """Against the other op, told that the sampler took one token of each row; one request is nobody's."""
    b = random_batch(num_reqs, seed, num_drafts=0)
    rows, defined = b.idx_mapping.clone(), [torch.ones(num_reqs + 5, dtype=torch.int32), poisoned(num_reqs + 5)]
    rows[num_reqs // 2] = -1
    defined[0][num_reqs:] = poisoned(5)
    who = {"idx_mapping": rows, "seq_lens": b.seq_lens, "prefill_len": b.prefill_len}
    num_sampled_and_rejected.execute(
        "spec", (*list(who.values())[:2], b.cu_num_logits, b.prefill_len, *defined, num_reqs)
    )
    outputs = dict(zip(("num_sampled", "num_rejected"), defined, strict=True))
    before = {name: poisoned(num_reqs + 5) for name in outputs}
    expect(num_sampled_without_drafts, apply, outputs, **who, **before, num_reqs=num_reqs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_reqs", [1, 3, 7, 128, 300])
def test_without_drafts_it_is_the_other(num_reqs: int, backend: str) -> None:
    for seed in range(4):
        check_without_drafts(implementation(num_sampled_without_drafts, backend), num_reqs, seed)


@pytest.mark.parametrize(
    ("backend", "bug"),
    [
        ("spec", ("num_sampled[:num_reqs] = 1", "pass")),
        ("spec", ("range(num_reqs + 1)", "[0] * (num_reqs + 1)")),
        ("interpret", (", other=0) >= known)", ", other=0) > known)")),
        ("interpret", ("finished = (row >= 0) & (", "finished = (row >= -1) & (")),
        ("interpret", ("tl.store(num_rejected + i, tl.zeros((BLOCK,), tl.int32), mask=mask)", "pass")),
    ],
)
def test_mutants_without_drafts_are_caught(backend: str, bug: tuple[str, str], tmp_path) -> None:
    broken = implementation(mutant(num_sampled_without_drafts, *bug, tmp_path), backend)
    assert caught(check_without_drafts, broken)
