"""One launch for a batch of plain decodes, against the four ops that define it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mrv2lab.ops.combine_tokens import combine_tokens
from mrv2lab.ops.gather_block_tables import gather_block_tables
from mrv2lab.ops.pos_seq_lens import pos_seq_lens
from mrv2lab.ops.prepare_decode import prepare_decode
from mrv2lab.ops.slot_mapping import slot_mapping
from tests.ops.backends import BACKENDS, CPU_BACKENDS, Apply, caught, compile_for_gpu, expect, implementation, mutant

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
OUTPUTS = ("input_tables", "query_start_loc", "input_ids", "positions", "seq_lens", "logits_indices", "slot_mappings")


def arguments(
    num_reqs: int, rows: int, block_sizes: tuple[int, ...], tokens: int, padded: int, seed: int, holes: bool
) -> dict[str, Any]:
    """Decodes anywhere in their lives on scattered rows; (``holes``) one is nobody's."""
    rng = np.random.default_rng(seed)

    def ints(shape: Any, low: int, high: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.from_numpy(rng.integers(low, high, shape)).to(dtype)

    longest = 60
    done = ints(rows, 1, longest)
    widths = [-(-longest // size) + 1 for size in block_sizes]
    idx_mapping = torch.from_numpy(rng.permutation(rows)[:num_reqs]).to(torch.int32)
    if holes:
        idx_mapping[num_reqs // 2] = -1
    return {
        "idx_mapping": idx_mapping,
        "num_computed_tokens": done,
        "last_sampled_tokens": ints(rows, 0, 1000, torch.int64),
        "tables": tuple(ints((rows, width), 1, 2**28) for width in widths),
        "table_ptrs": "tables",
        "input_tables": tuple(ints((rows, width), 1, 99) for width in widths),
        "input_ptrs": "input_tables",
        "table_strides": torch.tensor(widths),
        "block_sizes": torch.tensor(block_sizes, dtype=torch.int32),
        "query_start_loc": ints(rows + 1, -99, -1),
        "input_ids": ints(tokens, -99, -1),
        "positions": ints(tokens, -99, -1, torch.int64),
        "seq_lens": ints(rows, -99, -1),
        "logits_indices": ints(rows, -99, -1, torch.int64),
        "slot_mappings": ints((len(block_sizes), tokens), -99, -2, torch.int64),
        "num_reqs": num_reqs,
        "num_rows": padded,
    }


def defined(args: dict[str, Any]) -> dict[str, Any]:
    """What the four ops make of ``args``, by their specs."""
    given: dict[str, Any] = {
        name: tuple(one.clone() for one in value) if isinstance(value, tuple) else value
        for name, value in args.items()
        if not isinstance(value, str)
    }
    for name in OUTPUTS[1:]:
        given[name] = args[name].clone()
    starts = torch.arange(len(args["query_start_loc"]), dtype=torch.int32).clamp(max=args["num_reqs"])
    done = args["num_computed_tokens"]
    given |= {"query_start_loc": starts, "cu_num_logits": starts}
    given["draft_tokens"] = torch.zeros((len(done), 1), dtype=torch.int64)
    given["prefill_len"] = done - torch.arange(len(done), dtype=torch.int32) % 3
    given["num_blocks"] = torch.stack([done // size + 1 for size in args["block_sizes"]]).to(torch.int32)
    given |= {"table_ptrs": None, "input_ptrs": None}
    for op in (pos_seq_lens, combine_tokens, gather_block_tables, slot_mapping):
        op.execute("spec", tuple(given[name] for name in op.params))
    return {name: given[name] for name in OUTPUTS}


def check(
    apply: Apply,
    num_reqs: int = 4,
    rows: int = 9,
    block_sizes: tuple[int, ...] = (4, 16),
    tokens: int = 11,
    padded: int = 6,
    seed: int = 3,
    holes: bool = True,
) -> None:
    args = arguments(num_reqs, rows, block_sizes, tokens, padded, seed, holes)
    expect(prepare_decode, apply, defined(args), **args)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("num_reqs", "rows", "block_sizes", "tokens", "padded", "holes"),
    [
        (1, 1, (16,), 1, 1, False),
        (4, 9, (4, 16), 11, 6, True),
        (7, 7, (8,), 7, 7, True),
        (3, 9, (16, 1, 2), 8, 4, False),
        (2, 600, (4,), 9, 2, False),
        (3, 5, (4,), 1100, 5, True),
    ],
    ids=str,
)
def test_equals_the_four_ops(
    num_reqs: int, rows: int, block_sizes: tuple[int, ...], tokens: int, padded: int, holes: bool, backend: str
) -> None:
    apply = implementation(prepare_decode, backend)  # type: ignore[arg-type]
    check(apply, num_reqs, rows, block_sizes, tokens, padded, num_reqs + rows, holes)


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("num_reqs", [1, 17, 255, 1024])
def test_large_batches_on_a_gpu(num_reqs: int) -> None:
    for seed in range(3):
        check(implementation(prepare_decode, "triton"), num_reqs, 1024, (16, 1), 8192, 1024, seed, holes=seed > 0)


@needs_triton
def test_compiles_for_sm_90(tmp_path: Path) -> None:
    made: list[str] = []
    check_args = arguments(4, 9, (4, 16), 11, 6, 0, False)
    named = [
        torch.zeros(2, dtype=torch.uint64) if isinstance(check_args[name], str) else check_args[name]
        for name in prepare_decode.params
    ]
    made.append(compile_for_gpu(prepare_decode, tuple(named), tmp_path))
    assert "ld.global" in made[0]
    unspecialized = [param.name for param in prepare_decode.kernel.load().params if param.do_not_specialize]
    assert unspecialized == ["num_reqs", "num_rows"]


MUTANTS = {
    "spec": [
        ("np.flatnonzero(live)", "np.arange(num_reqs)"),
        ("np.minimum(np.arange(len(query_start_loc)), num_reqs)", "np.arange(len(query_start_loc))"),
        ("seq_lens[num_reqs:] = done + 1, 0", "seq_lens[num_reqs:] = done + 1, 1"),
        ("input_table[num_reqs:num_rows] = 0", "pass"),
        ("slot_mappings[g] = -1", "pass"),
        ("np.where(live, num_computed_tokens[rows], 0)", "num_computed_tokens[rows]"),
        ("input_table[i, : block + 1] = blocks[: block + 1]", "input_table[i] = blocks"),
    ],
    "interpret": [
        ("mask=tail <= max_num_reqs", "mask=tail < max_num_reqs"),
        ("token.to(tl.int32), mask=live)", "token.to(tl.int32))"),
        (
            "tl.zeros((BLOCK,), tl.int32), mask=tail < max_num_reqs",
            "tl.full((BLOCK,), 1, tl.int32), mask=tail < max_num_reqs",
        ),
        ("tl.store(slots + i, tl.full((), -1, tl.int64))", "pass"),
        (
            "tl.full((BLOCK,), -1, tl.int64), mask=tail < max_num_tokens",
            "tl.full((BLOCK,), -1, tl.int64), mask=tail < 0",
        ),
        ("last = done // block_size", "last = done // (block_size + 1)"),
        ("mask = offset <= last", "mask = offset < stride"),
    ],
}


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("bug", range(7))
def test_mutants_are_caught(backend: str, bug: int, tmp_path: Path) -> None:
    broken = mutant(prepare_decode, *MUTANTS[backend][bug], tmp_path)
    assert caught(check, implementation(broken, backend))  # type: ignore[arg-type]
