"""A negative row is nobody's: dummy runs have nothing else. Its tables are neither read nor written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mrv2lab.ops.combine_tokens import combine_tokens
from mrv2lab.ops.gather_block_tables import gather_block_tables
from mrv2lab.ops.num_sampled import num_sampled_and_rejected
from mrv2lab.ops.pos_seq_lens import pos_seq_lens
from mrv2lab.ops.post_update import post_update
from mrv2lab.ops.prefill_inputs import prefill_inputs
from mrv2lab.ops.slot_mapping import slot_mapping
from tests.ops.backends import BACKENDS, CPU_BACKENDS, Apply, caught, expect, implementation, mutant

R, NOBODY = 3, -1
STARTS = [0, 2, 5, 5]
"""Two requests of two and three tokens, nobody's and row 1's."""


def table(*values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """One value, or list of values, a row."""
    return torch.tensor(values, dtype=dtype)


ROWS = table(NOBODY, 1)
MINE = table(5, 6, 7)
"""Counters: row 1 has computed 6 tokens, and nobody 7 if somebody looks."""


def check_pos_seq_lens(apply: Apply) -> None:
    expect(
        pos_seq_lens,
        apply,
        {"positions": [0, 1, 6, 7, 8], "seq_lens": [2, 9, 0]},
        idx_mapping=ROWS,
        query_start_loc=table(*STARTS),
        num_computed_tokens=MINE,
        positions=table(*[-5] * 5, dtype=torch.int64),
        seq_lens=table(-5, -5, -5),
        num_reqs=2,
    )


def check_prefill_inputs(apply: Apply) -> None:
    tokens = table(*[[100 * row + k for k in range(12)] for row in range(R)])
    expect(
        prefill_inputs,
        apply,
        {"input_ids": [-5, -5, 106, 107, 108], "next_prefill_tokens": [[-5, 109, -5]]},
        idx_mapping=ROWS,
        query_start_loc=table(*STARTS),
        all_token_ids=tokens,
        prefill_len=table(10, 10, 90),
        num_computed_tokens=MINE,
        input_ids=table(*[-5] * 5),
        next_prefill_tokens=table([-5, -5, -5]),
        num_reqs=2,
    )


def check_combine_tokens(apply: Apply) -> None:
    expect(
        combine_tokens,
        apply,
        {"input_ids": [-5, -5, -5, -5, 31], "logits_indices": [1, 4]},
        idx_mapping=ROWS,
        query_start_loc=table(*STARTS),
        cu_num_logits=table(0, 1, 2),
        seq_lens=table(2, 9, 0),
        prefill_len=table(0, 8, 0),
        last_sampled_tokens=table(30, 31, 32, dtype=torch.int64),
        draft_tokens=table([1], [2], [3], dtype=torch.int64),
        input_ids=table(*[-5] * 5),
        logits_indices=table(-5, -5, dtype=torch.int64),
        num_reqs=2,
    )


def check_gather_block_tables(apply: Apply) -> None:
    expect(
        gather_block_tables,
        apply,
        {"input_tables": (torch.tensor([[0, 0], [21, 22], [0, 0]]),)},
        idx_mapping=ROWS,
        num_blocks=table([1, 2, 2]),
        tables=(table([11, 12], [21, 22], [31, 32]),),
        table_ptrs="tables",
        input_tables=(table([-5, -5], [-5, -5], [-5, -5]),),
        input_ptrs="input_tables",
        table_strides=torch.tensor([2]),
        num_reqs=2,
        num_rows=3,
    )


def check_slot_mapping(apply: Apply) -> None:
    expect(
        slot_mapping,
        apply,
        {"slot_mappings": [[-1, -1, 4 * 22 + 2, 4 * 22 + 3, 4 * 23, -1]]},
        idx_mapping=ROWS,
        query_start_loc=table(*STARTS),
        positions=table(0, 1, 6, 7, 8, 99, dtype=torch.int64),
        tables=(table([11, 12, 13], [21, 22, 23], [31, 32, 33]),),
        table_ptrs="tables",
        table_strides=torch.tensor([3]),
        block_sizes=torch.tensor([4], dtype=torch.int32),
        slot_mappings=table([-5] * 6, dtype=torch.int64),
        num_reqs=2,
    )


def check_num_sampled(apply: Apply) -> None:
    expect(
        num_sampled_and_rejected,
        apply,
        {"num_sampled": [0, 1], "num_rejected": [0, 0]},
        idx_mapping=ROWS,
        seq_lens=table(200, 9, 0),
        cu_num_logits=table(0, 1, 2),
        prefill_len=table(8, 8, 8),
        num_sampled=table(1, 1),
        num_rejected=table(-5, -5),
        num_reqs=2,
    )


def check_post_update(apply: Apply) -> None:
    tokens = table(*[[100 * row + k for k in range(12)] for row in range(R)])
    after = tokens.clone()
    after[1, 9] = 8
    expect(
        post_update,
        apply,
        {
            "all_token_ids": after,
            "last_sampled_tokens": [30, 8, 32],
            "total_len": [5, 10, 7],
            "num_computed_tokens": [5, 9, 7],
        },
        idx_mapping=ROWS,
        query_start_loc=table(*STARTS),
        sampled_tokens=table([7], [8], dtype=torch.int64),
        num_sampled=table(1, 1),
        num_rejected=table(0, 0),
        all_token_ids=tokens,
        last_sampled_tokens=table(30, 31, 32, dtype=torch.int64),
        total_len=table(5, 9, 7),
        num_computed_tokens=MINE,
        num_reqs=2,
    )


CHECKS: dict[str, tuple[Any, Callable[[Apply], None]]] = {
    "pos_seq_lens": (pos_seq_lens, check_pos_seq_lens),
    "prefill_inputs": (prefill_inputs, check_prefill_inputs),
    "combine_tokens": (combine_tokens, check_combine_tokens),
    "gather_block_tables": (gather_block_tables, check_gather_block_tables),
    "slot_mapping": (slot_mapping, check_slot_mapping),
    "num_sampled": (num_sampled_and_rejected, check_num_sampled),
    "post_update": (post_update, check_post_update),
}

MUTANTS = {
    "pos_seq_lens": {
        "spec": (" if idx_mapping[i] >= 0 else 0", ""),
        "interpret": ("mask=row >= 0, other=0)", "mask=row >= 0, other=7)"),
    },
    "prefill_inputs": {
        "spec": ("if row < 0:\n            continue", "if row < 0:\n            row = 0"),
        "interpret": ("if row < 0:\n        return", "if row < 0:\n        row = 0"),
    },
    "combine_tokens": {
        "spec": ("if row >= 0 and seq_lens", "if seq_lens"),
        "interpret": ("if row < 0:\n        return", "if row < 0:\n        row = 0"),
    },
    "gather_block_tables": {
        "spec": ("if row < 0:\n                input", "if row < -1:\n                input"),
        "interpret": (
            "row = tl.load(idx_mapping + i, mask=i < num_reqs, other=-1)",
            "row = tl.maximum(tl.load(idx_mapping + i, mask=i < num_reqs, other=0), 0)",
        ),
    },
    "num_sampled": {
        "spec": ("if idx_mapping[i] < 0 or seq_lens", "if seq_lens"),
        "interpret": ("(row < 0) | (", "(row < -1) | ("),
    },
}
"""Nobody taken for somebody: for the last row, or, where that would leave the buffers, for row 0."""


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CHECKS)
def test_nobodys_row_is_skipped(name: str, backend: Any) -> None:
    op, check = CHECKS[name]
    check(implementation(op, backend))


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name: str, backend: Any, tmp_path: Any) -> None:
    op, check = CHECKS[name]
    assert caught(check, implementation(mutant(op, *MUTANTS[name][backend], tmp_path), backend))
