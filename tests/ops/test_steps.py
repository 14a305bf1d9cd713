"""All integer ops together: a toy engine whose "model" reads only what the ops prepared, against plain generation.

The model's next token is a hash of the tokens it finds in the KV cache at the slots of positions 0..p, so one wrong
input id, position, slot, block or counter anywhere changes a token. Only wrong drafts do not: they are rejected.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch

from mrv2lab.ops._op import Backend, Op
from mrv2lab.ops.apply_write import apply_write
from mrv2lab.ops.combine_tokens import combine_tokens
from mrv2lab.ops.expand_idx_mapping import expand_idx_mapping
from mrv2lab.ops.fused_apply_write import fused_apply_write
from mrv2lab.ops.gather_block_tables import gather_block_tables
from mrv2lab.ops.num_sampled import num_sampled_and_rejected
from mrv2lab.ops.pos_seq_lens import pos_seq_lens
from mrv2lab.ops.post_update import post_update
from mrv2lab.ops.prefill_inputs import prefill_inputs
from mrv2lab.ops.slot_mapping import slot_mapping
from tests.ops.backends import mutant, pointer_table, run

R, L, T, K, VOCAB = 5, 48, 64, 3, 11
BLOCK_SIZES = (4, 8)
WIDTHS = tuple(-(-L // size) for size in BLOCK_SIZES)


def next_token(tokens: list[int]) -> int:
    return sum((i + 1) * (token + 1) for i, token in enumerate(tokens)) * 7919 % 65537 % VOCAB


def generate(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens


def full(*shape: int, dtype: type = np.int32) -> np.ndarray:
    return np.full(shape, -7777, dtype)


def int32(values) -> np.ndarray:
    return np.array(values, np.int32)


class Engine:
    """Two KV-cache groups; arrays are NumPy's, and ops get tensors over the same memory."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.tokens, self.prefill_len, self.total_len, self.num_computed = full(R, L), full(R), full(R), full(R)
        self.last_sampled, self.drafts = full(R, dtype=np.int64), full(R, K, dtype=np.int64)
        self.next_prefill = full(1, R)
        self.tables = tuple(full(R, width) for width in WIDTHS)
        self.input_tables = tuple(full(R, width) for width in WIDTHS)
        self.num_blocks = full(len(WIDTHS), R)
        self.slots = full(len(WIDTHS), T, dtype=np.int64)
        self.input_ids, self.positions, self.seq_lens = full(T), full(T, dtype=np.int64), full(R)
        self.kv: list[dict[int, int]] = [{} for _ in WIDTHS]
        self.free_rows = list(range(R))
        self.free_blocks = [list(range(1, R * width + 1)) for width in WIDTHS]
        self.dirty_rows = 0

    def run(self, op: Op, *args: Any) -> None:
        """A pointer table is given as "table_ptrs": it points into the tuple before it."""
        tensors: list[Any] = []
        for arg in args:
            if isinstance(arg, np.ndarray):
                tensors.append(torch.from_numpy(arg))
            elif isinstance(arg, tuple):
                tensors.append(tuple(torch.from_numpy(item) for item in arg))
            else:
                tensors.append(pointer_table(tensors[-1]) if arg == "table_ptrs" else arg)
        run(op, tuple(tensors), self.backend)

    def add(self, row: int, tokens: list[int]) -> None:
        """A (re)admitted request with all its blocks; the row keeps whatever its last owner left."""
        self.free_rows.remove(row)
        self.prefill_len[row] = len(tokens)
        one = int32([row]), int32([0]), int32([0, 1])
        self.run(apply_write, self.total_len[:, None], *one, int32([len(tokens)]), 1, 1)
        self.run(apply_write, self.num_computed[:, None], *one, int32([0]), 1, 1)
        self.run(apply_write, self.tokens, *one[:2], int32([0, len(tokens)]), int32(tokens), 1, len(tokens))
        blocks = [[self.free_blocks[g].pop() for _ in range(width)] for g, width in enumerate(WIDTHS)]
        self.num_blocks[:, row] = WIDTHS
        self.run(
            fused_apply_write,
            self.tables,
            "table_ptrs",
            np.array(WIDTHS),
            int32(range(len(WIDTHS))),
            int32([row] * len(WIDTHS)),
            int32([0] * len(WIDTHS)),
            int32(np.cumsum([0, *WIDTHS])),
            int32([block for ids in blocks for block in ids]),
            len(WIDTHS),
            max(WIDTHS),
        )

    def remove(self, row: int) -> None:
        self.free_rows.append(row)
        for g in range(len(WIDTHS)):
            self.free_blocks[g] += self.tables[g][row].tolist()

    def step(self, rows: list[int], query_lens: list[int], num_logits: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """sampled [r, K + 1] and num_sampled [r]."""
        r, t = len(rows), sum(query_lens)
        idx_mapping, cu_num_logits = int32(rows), int32([0, *np.cumsum(num_logits)])
        query_start_loc = int32([0, *np.cumsum(query_lens), *[t] * (R - r)])
        logits_indices, expanded = full(cu_num_logits[-1], dtype=np.int64), full(cu_num_logits[-1])
        local_pos, num_rejected = full(cu_num_logits[-1]), full(r)
        batch = idx_mapping, query_start_loc
        num_rows, self.dirty_rows = max(r, self.dirty_rows), r
        self.run(
            prefill_inputs,
            *batch,
            self.tokens,
            self.prefill_len,
            self.num_computed,
            self.input_ids,
            self.next_prefill,
            r,
        )
        self.run(pos_seq_lens, *batch, self.num_computed, self.positions, self.seq_lens, r)
        self.run(
            combine_tokens,
            *batch,
            cu_num_logits,
            self.seq_lens,
            self.prefill_len,
            self.last_sampled,
            self.drafts,
            self.input_ids,
            logits_indices,
            r,
        )
        self.run(expand_idx_mapping, idx_mapping, cu_num_logits, expanded, local_pos, r)
        self.run(
            gather_block_tables,
            idx_mapping,
            self.num_blocks,
            self.tables,
            "table_ptrs",
            self.input_tables,
            "table_ptrs",
            np.array(WIDTHS),
            r,
            num_rows,
        )
        self.run(
            slot_mapping,
            *batch,
            self.positions,
            self.tables,
            "table_ptrs",
            np.array(WIDTHS),
            int32(BLOCK_SIZES),
            self.slots,
            r,
        )
        assert (self.slots[:, t:] == -1).all()
        assert (self.seq_lens[r:] == 0).all()
        for g, kv in enumerate(self.kv):
            assert (self.input_tables[g][r:num_rows] == 0).all()
            for slot, token in zip(self.slots[g, :t].tolist(), self.input_ids[:t].tolist(), strict=True):
                kv[slot] = token

        # The model and a greedy verifier.
        logits_rows = iter(zip(logits_indices.tolist(), expanded.tolist(), local_pos.tolist(), strict=True))
        sampled, num_sampled = full(r, K + 1, dtype=np.int64), int32([0] * r)
        for i in range(r):
            accepting = True
            for j in range(num_logits[i]):
                token_index, row, local = next(logits_rows)
                assert (row, local) == (rows[i], j)
                if accepting:
                    sampled[i, j] = next_token(self.read_kv(i, int(self.positions[token_index])))
                    num_sampled[i] += 1
                    last = j == num_logits[i] - 1
                    placeholder = self.positions[token_index] + 1 < self.prefill_len[row]
                    accepting = not last and not placeholder and self.input_ids[token_index + 1] == sampled[i, j]
        self.run(
            num_sampled_and_rejected,
            idx_mapping,
            self.seq_lens,
            cu_num_logits,
            self.prefill_len,
            num_sampled,
            num_rejected,
            r,
        )
        self.run(
            post_update,
            *batch,
            sampled,
            num_sampled,
            num_rejected,
            self.tokens,
            self.last_sampled,
            self.total_len,
            self.num_computed,
            r,
        )
        return sampled, num_sampled

    def read_kv(self, i: int, position: int) -> list[int]:
        """The tokens at positions 0..position of batch row i, as attention would find them; all groups must agree."""
        found = [
            [kv[int(table[i, p // size]) * size + p % size] for p in range(position + 1)]
            for kv, table, size in zip(self.kv, self.input_tables, BLOCK_SIZES, strict=True)
        ]
        assert found[0] == found[1]
        return found[0]


def simulate(seed: int, num_steps: int, backend: Backend) -> None:
    """Random chunks, drafts, orders and preemptions, checked after every step."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, VOCAB, rng.integers(1, 12)).tolist() for _ in range(3)]
    right = [generate(prompt, 40) for prompt in prompts]
    output = [list(prompt) for prompt in prompts]
    engine, rows = Engine(backend), {}
    for _ in range(num_steps):
        for request in range(len(prompts)):
            if request in rows and rng.random() < 0.1:  # preempted
                engine.remove(rows.pop(request))
            elif request not in rows:
                rows[request] = int(rng.choice(engine.free_rows))
                engine.add(rows[request], output[request])
        chosen = [
            request for request in rng.permutation(len(prompts)).tolist() if rng.random() < 0.8 and request in rows
        ]
        query_lens, num_logits = [], []
        for request in chosen:
            row = rows[request]
            left = int(engine.prefill_len[row] - engine.num_computed[row])
            drafts = int(rng.integers(0, K + 1))
            if left > 1 or (left == 1 and drafts == 0):
                query_lens.append(int(rng.integers(1, left + 1)))
                num_logits.append(1)
            else:  # decode, or the last prompt token padded by placeholder drafts
                guess = right[request][engine.total_len[row] :][:K]
                guess = [token if rng.random() < 0.7 else 0 for token in guess] + [0] * (K - len(guess))
                engine.drafts[row] = guess if left == 0 else [0] * K
                query_lens.append(1 + drafts)
                num_logits.append(1 + drafts)
        if not chosen:
            continue
        sampled, num_sampled = engine.step([rows[request] for request in chosen], query_lens, num_logits)
        for i, request in enumerate(chosen):
            row = rows[request]
            output[request] += sampled[i, : num_sampled[i]].tolist()
            total, computed = int(engine.total_len[row]), int(engine.num_computed[row])
            assert engine.tokens[row, :total].tolist() == output[request]
            if computed >= engine.prefill_len[row]:
                assert computed == total - 1
                assert engine.last_sampled[row] == output[request][-1]
            else:
                assert total == engine.prefill_len[row]
            assert output[request] == right[request][: len(output[request])]
        for request in list(rows):
            if len(output[request]) >= 32:  # finished: the row returns, and the request starts over
                engine.remove(rows.pop(request))
                output[request] = list(prompts[request])


def test_tokens_equal_plain_generation() -> None:
    hypothesis = pytest.importorskip("hypothesis")
    st = hypothesis.strategies

    @hypothesis.settings(max_examples=60)
    @hypothesis.given(seed=st.integers(0, 2**32), num_steps=st.integers(1, 40))
    def law(seed: int, num_steps: int) -> None:
        simulate(seed, num_steps, "spec")

    law()


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(3))
def test_tokens_equal_plain_generation_on_a_gpu(seed: int) -> None:
    simulate(seed, 30, "triton")


@pytest.mark.parametrize(
    ("op", "old", "new"),
    [
        (apply_write, "starts[w] : starts[w] + len(values)] = values", "starts[w] : starts[w] + 1] = values[:1]"),
        (fused_apply_write, "tables[group_ids[w]]", "tables[0]"),
        (prefill_inputs, "prefill_len[row], num_computed_tokens[row]", "prefill_len[row], num_computed_tokens[i]"),
        (pos_seq_lens, "seq_lens[num_reqs:] = 0", "pass"),
        (combine_tokens, ">= prefill_len[row]", ">= prefill_len[row] - 1"),
        (expand_idx_mapping, "= idx_mapping[i]", "= i"),
        (num_sampled_and_rejected, "< prefill_len", "<= prefill_len"),
        (post_update, " - num_rejected[i]", ""),
        (post_update, "total_len[row] += k", "total_len[row] += 1"),
        (gather_block_tables, "table[row, : counts[row]]", "table[i, : counts[row]]"),
        (slot_mapping, "positions[query] % block_size", "positions[query] % 4"),
    ],
    ids=lambda value: value.name if isinstance(value, Op) else "",
)
def test_a_bug_in_any_op_changes_a_token(op: Op, old: str, new: str, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], op.name, mutant(op, old, new, tmp_path))
    with pytest.raises((AssertionError, KeyError, IndexError, ValueError)):
        simulate_many()


def simulate_many() -> None:
    for seed in range(10):
        simulate(seed, 30, "spec")
