"""Bad words: by hand, drafts as outputs, the prompt left out, long words, and every (committed, drafts) border."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mrv2lab.ops.bad_words import bad_words
from tests.ops.backends import BACKENDS, CPU_BACKENDS, Apply, caught, implementation, mutant
from tests.ops.test_count_tokens import int32
from tests.sample import oracle

INF = float("inf")
STALE = 1
"""What lies around every token that may be read: a word begins with it."""


def apply_to(
    apply: Apply, vocab: int, requests: list[tuple[list[int], list[int], list[int], list[tuple[int, ...]]]], padding=()
) -> torch.Tensor:
    """``requests`` are (prompt, outputs, drafts, words), request i on row r - 1 - i, 1 + drafts logits rows each;
    returns the logits, zeros at first."""
    r = len(requests)
    tokens = np.full((r, 80), STALE)
    word_ids, offsets = np.full((r, 1024), STALE), np.full((r, 129), STALE)
    prompt_len, total_len, num_words = np.zeros(r, int), np.zeros(r, int), np.zeros(r, int)
    mapping, local, indices, ids = [], [], [], []
    for i, (prompt, outputs, drafts, words) in enumerate(requests):
        row = r - 1 - i
        known = [*prompt, *outputs]
        tokens[row, : len(known)] = known
        prompt_len[row], total_len[row], num_words[row] = len(prompt), len(known), len(words)
        flat = [token for word in words for token in word]
        word_ids[row, : len(flat)] = flat
        offsets[row, : len(words) + 1] = np.cumsum([0, *map(len, words)])
        ids += [STALE, known[-1]]
        for pos in range(len(drafts) + 1):
            mapping.append(-1 if len(mapping) in padding else row)
            local.append(pos)
            indices.append(len(ids) - 1 + pos)
        ids += drafts
    logits = torch.zeros(len(mapping), vocab + 2)
    apply(
        logits[:, 1 : vocab + 1], int32(mapping), int32(local), torch.tensor(indices), int32([*ids, STALE]),
        int32(tokens), int32(prompt_len), int32(total_len), int32(word_ids), int32(offsets), int32(num_words),
        int(num_words.max()),
    )  # fmt: skip
    assert not logits[:, [0, -1]].any()
    return logits[:, 1 : vocab + 1]


def banned(row: torch.Tensor) -> list[int]:
    return torch.nonzero(row == -INF)[:, 0].tolist()


def check_by_hand(apply: Apply) -> None:
    words = [(4,), (1, 2), (2, 3), (5, 1, 2, 6), (9,)]
    logits = apply_to(
        apply,
        8,
        [
            ([0, 1], [], [], words),  # the prompt does not count; token 9 is outside the vocabulary
            ([0], [5, 1], [2, 0], words),  # after 5 1: 2; after 5 1 2: 3 and 6; after a draft 0: nothing
            ([0], [5, 1], [2], []),
        ],
        padding=(5,),
    )
    assert [banned(row) for row in logits] == [[4], [2, 4], [3, 4, 6], [4], [], []]


def check(apply: Apply, seed: int = 0, drafts: int = 2, longest: int = 5) -> None:
    rng = np.random.default_rng(seed)
    requests = []
    for i in range(2):
        outputs, own = rng.integers(0, 3, 3 + 30 * i).tolist(), rng.integers(0, 3, drafts).tolist()
        words = [tuple(rng.integers(0, 3, rng.integers(1, longest)).tolist()) for _ in range(2)]
        said = outputs + own
        words.append((*said[len(said) - min(len(said), longest) :], 4))  # one that is matched at the last draft
        requests.append(([2, 1, 0], outputs, own, words))
    logits = apply_to(apply, 5, requests)
    i = 0
    for _, outputs, own, words in requests:
        for pos in range(drafts + 1):
            want = oracle.bad_words(np.zeros(5), outputs + own[:pos], words)
            assert banned(logits[i]) == np.flatnonzero(want == -INF).tolist()
            i += 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_by_hand(backend):
    check_by_hand(implementation(bad_words, backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("drafts", [0, 1, 4])
@pytest.mark.parametrize("seed", range(3))
def test_bad_words(backend, drafts, seed):
    check(implementation(bad_words, backend), seed, drafts)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_word_longer_than_a_block(backend):
    check(implementation(bad_words, backend), 3, drafts=1, longest=34)


@pytest.mark.gpu
def test_tokens_in_pinned_memory():
    def pinned(*args):
        implementation(bad_words, "triton")(*(arg.pin_memory() if i == 5 else arg for i, arg in enumerate(args)))

    check_by_hand(pinned)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    logits = torch.zeros(1, 4, dtype=dtype)
    one = int32([[0]])
    offsets, zero, count = int32([[0, 1]]), torch.zeros(1, dtype=torch.int64), int32([1])
    args = (int32([0]), int32([0]), zero, int32([0]), one, count, count, int32([[2]]), offsets, count, 1)
    implementation(bad_words, "triton")(logits, *args)
    assert banned(logits[0]) == [2]


MUTANTS = {
    "spec": [
        ("int(prompt_len[index]) : int(total_len[index])", ": int(total_len[index])"),
        ("input_ids[last - int(local_pos[row]) : last]", "input_ids[last - int(local_pos[row]) - 1 : last]"),
        ("input_ids[last - int(local_pos[row]) : last]", "input_ids[last:last]"),
        ("not head or ", ""),
        (" and token < logits.shape[1]", ""),
        ("if index < 0 or not", "if not"),
    ],
    "interpret": [
        ("    prompt = tl.load(prompt_len + index)\n", "    prompt = tl.load(prompt_len + index) * 0\n"),
        ("- drafts + 1 - committed\n", "- drafts - committed\n"),
        ("drafts = tl.load(local_pos + row)", "drafts = tl.load(local_pos + row) * 0"),
        ("if head > committed + drafts:", "if head >= committed + drafts:"),
        (" & (token < vocab):", " & (token < vocab + 1):"),
        ("    if index < 0:\n        return\n", "    index = tl.maximum(index, 0)\n"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("bug", range(6))
def test_mutants(backend, bug, tmp_path):
    buggy = implementation(mutant(bad_words, *MUTANTS[backend][bug], tmp_path), backend)

    def all_checks(apply):
        check_by_hand(apply)
        logits = apply_to(apply, 5, [([0], [1], [2], [(1, 2, 3), (5,)]), ([0], [1], [], [(1, 2)])], padding=(2,))
        assert [banned(row) for row in logits] == [[], [3], []]

    assert caught(all_checks, buggy)
