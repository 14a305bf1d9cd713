"""One launch for a batch without drafts, against the five ops that define it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrv2lab.ops.combine_tokens import combine_tokens
from mrv2lab.ops.gather_block_tables import gather_block_tables
from mrv2lab.ops.pos_seq_lens import pos_seq_lens
from mrv2lab.ops.prefill_inputs import prefill_inputs
from mrv2lab.ops.prepare_batch import prepare_batch
from mrv2lab.ops.slot_mapping import slot_mapping
from tests.ops.backends import (
    BACKENDS,
    CPU_BACKENDS,
    Apply,
    caught,
    compile_for_gpu,
    expect,
    implementation,
    mutant,
    poisoned,
)  # fmt: skip
from tests.ops.batches import random_batch

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
PARTS = (prefill_inputs, pos_seq_lens, combine_tokens, gather_block_tables, slot_mapping)


def arguments(
    num_reqs: int,
    block_sizes: tuple[int, ...],
    seed: int,
    *,
    max_len: int = 45,
    spare: int = 4,
    padded: int = 0,
    lookahead: int = 1,
    holes: tuple[int, ...] = (),
) -> dict[str, Any]:
    """Chunks, ends of prefills, last prompt tokens and decodes on scattered rows; those of ``holes`` are nobody's.
    ``padded`` and ``spare``: rows of the input tables, rows and tokens behind the batch's."""
    b = random_batch(num_reqs, seed, num_drafts=0, max_len=max_len, spare_rows=spare)
    rng = np.random.default_rng(seed)
    widths = [-(-max_len // size) + 1 for size in block_sizes]
    rows, tokens = b.idx_mapping.clone(), b.num_tokens + spare
    rows[[i % num_reqs for i in holes]] = -1
    return {
        "sent_rows": torch.cat([rows, poisoned(2)]),
        "sent_starts": torch.cat([b.query_start_loc[: num_reqs + 1], poisoned(2)]),
        "num_computed_tokens": b.num_computed_tokens,
        "prefill_len": b.prefill_len,
        "last_sampled_tokens": b.last_sampled_tokens,
        "all_token_ids": b.all_token_ids,
        "tables": tuple(
            torch.from_numpy(rng.integers(1, 2**28, (b.num_rows, width), np.int32, endpoint=True)) for width in widths
        ),
        "table_ptrs": "tables",
        "input_tables": tuple(poisoned(b.num_rows, width) for width in widths),
        "input_ptrs": "input_tables",
        "table_strides": torch.tensor(widths),
        "block_sizes": torch.tensor(block_sizes, dtype=torch.int32),
        "idx_mapping": poisoned(b.num_rows),
        "query_start_loc": poisoned(b.num_rows + 1),
        "input_ids": poisoned(tokens),
        "next_prefill_tokens": poisoned(lookahead, b.num_rows),
        "positions": poisoned(tokens, dtype=torch.int64),
        "seq_lens": poisoned(b.num_rows),
        "logits_indices": poisoned(b.num_rows, dtype=torch.int64),
        "slot_mappings": poisoned(len(block_sizes), tokens, dtype=torch.int64),
        "num_reqs": num_reqs,
        "num_tokens": b.num_tokens,
        "num_rows": min(num_reqs + padded, b.num_rows),
    }


def defined(args: dict[str, Any]) -> dict[str, Any]:
    """What the five ops make of ``args``, by their specs."""
    given: dict[str, Any] = {
        name: tuple(one.clone() for one in value) if isinstance(value, tuple) else value.clone()
        for name, value in args.items()
        if isinstance(value, (torch.Tensor, tuple))
    }
    count, live = args["num_reqs"], [row for row in args["sent_rows"].tolist()[: args["num_reqs"]] if row >= 0]
    starts = args["sent_starts"][: count + 1]
    given["idx_mapping"][:count] = args["sent_rows"][:count]
    given["query_start_loc"][:] = args["num_tokens"]
    given["query_start_loc"][: count + 1] = starts
    lengths = dict(zip(args["sent_rows"].tolist(), starts.diff().tolist(), strict=False))
    num_blocks = poisoned(len(args["tables"]), len(args["prefill_len"]))
    for g, size in enumerate(args["block_sizes"].tolist()):
        for row in live:
            num_blocks[g, row] = -(-(int(args["num_computed_tokens"][row]) + lengths[row]) // size)
    others = {
        "cu_num_logits": torch.arange(count + 1, dtype=torch.int32),
        "draft_tokens": torch.zeros((len(args["prefill_len"]), 1), dtype=torch.int64),
        "num_blocks": num_blocks,
        "table_ptrs": None,
        "input_ptrs": None,
        "num_reqs": count,
        "num_rows": args["num_rows"],
    }
    for part in PARTS:
        part.execute("spec", tuple((given | others)[name] for name in part.params))
    return given


def check(
    apply: Apply,
    num_reqs: int = 4,
    block_sizes: tuple[int, ...] = (4, 16),
    seed: int = 3,
    padded: int = 2,
    holes: tuple[int, ...] = (),
    **shape: int,
) -> None:
    args = arguments(num_reqs, block_sizes, seed, padded=padded, holes=holes, **shape)
    expect(prepare_batch, apply, defined(args), **args)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("num_reqs", "block_sizes", "shape"),
    [
        (1, (16,), {"spare": 0, "padded": 0}),
        (4, (4, 16), {"holes": (1,)}),
        (4, (8,), {"seed": 4, "holes": (0, 1, 2, 3)}),
        (3, (16, 1, 2), {"spare": 1, "lookahead": 3}),
        (2, (4,), {"seed": 1, "max_len": 5000, "spare": 1500}),
        (4, (16,), {"seed": 8, "max_len": 2500}),
    ],
    ids=str,
)
def test_equals_the_five_ops(num_reqs: int, block_sizes: tuple[int, ...], shape: dict[str, Any], backend: str) -> None:
    check(implementation(prepare_batch, backend), num_reqs, block_sizes, **shape)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_any_batch(backend: str) -> None:
    apply = implementation(prepare_batch, backend)  # type: ignore[arg-type]

    @settings(max_examples=100 if backend == "spec" else 30, deadline=None, database=None)
    @given(
        num_reqs=st.integers(1, 6),
        block_sizes=st.lists(st.sampled_from([1, 2, 3, 16, 64]), min_size=1, max_size=2).map(tuple),
        seed=st.integers(0, 10_000),
        padded=st.integers(0, 3),
        spare=st.integers(0, 5),
        lookahead=st.integers(1, 3),
        holes=st.sets(st.integers(0, 5), max_size=2).map(tuple),
    )
    def law(**drawn: Any) -> None:
        check(apply, **drawn)

    law()


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_a_decode_a_chunk_and_the_end_of_a_prompt(backend: str) -> None:
    """Row 2 decodes its 7th token, row 0 computes prompt tokens 2 and 3 of 5, row 1 the last two of its three."""
    tables = torch.tensor([[5, 6, 7], [8, 9, 10], [11, 12, 13]], dtype=torch.int32)
    args: dict[str, Any] = arguments(3, (3,), 0, spare=0) | {
        "sent_rows": torch.tensor([2, 0, 1], dtype=torch.int32),
        "sent_starts": torch.tensor([0, 1, 3, 5], dtype=torch.int32),
        "num_computed_tokens": torch.tensor([2, 1, 6], dtype=torch.int32),
        "prefill_len": torch.tensor([5, 3, 4], dtype=torch.int32),
        "last_sampled_tokens": torch.tensor([90, 91, 92]),
        "all_token_ids": torch.arange(24, dtype=torch.int32).reshape(3, 8),
        "tables": (tables,),
        "input_tables": (poisoned(3, 3),),
        "table_strides": torch.tensor([3]),
        "input_ids": poisoned(7),
        "positions": poisoned(7, dtype=torch.int64),
        "slot_mappings": poisoned(1, 7, dtype=torch.int64),
        "num_tokens": 5,
    }
    p = -7777
    expected = {
        "idx_mapping": [2, 0, 1],
        "query_start_loc": [0, 1, 3, 5],
        "input_ids": [92, 2, 3, 9, 10, p, p],
        "next_prefill_tokens": [[4, 0, p]],
        "positions": [6, 2, 3, 1, 2, p, p],
        "seq_lens": [7, 4, 3],
        "logits_indices": [0, 2, 4],
        "input_tables": ([[11, 12, 13], [5, 6, p], [8, p, p]],),
        "slot_mappings": [[13 * 3, 5 * 3 + 2, 6 * 3, 8 * 3 + 1, 8 * 3 + 2, -1, -1]],
    }
    expect(prepare_batch, implementation(prepare_batch, backend), expected, **args)  # type: ignore[arg-type]


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize(("num_reqs", "max_len"), [(1, 16384), (5, 4096), (256, 300), (1000, 40)])
def test_large_batches_on_a_gpu(num_reqs: int, max_len: int) -> None:
    for seed in range(4):
        shape: dict[str, Any] = {"spare": 1024, "padded": 40, "holes": (seed,) if seed else ()}
        check(implementation(prepare_batch, "triton"), num_reqs, (16, 1), seed, max_len=max_len, **shape)


@needs_triton
def test_compiles_for_sm_90(tmp_path: Path) -> None:
    args = arguments(4, (4, 16), 0)
    pointers = torch.zeros(2, dtype=torch.uint64)
    named = tuple(pointers if isinstance(args[name], str) else args[name] for name in prepare_batch.params)
    assert "ld.global" in compile_for_gpu(prepare_batch, named, tmp_path)
    unspecialized = [param.name for param in prepare_batch.kernel.load().params if param.do_not_specialize]
    assert unspecialized == ["num_reqs", "num_tokens", "num_rows"]


MUTANTS = {
    "spec": [
        ("= sent_starts[:num_reqs], num_tokens", "= sent_starts[:num_reqs], 0"),
        ("idx_mapping[:num_reqs] = rows = ", "rows = "),
        ("-(-seq_lens[live]", "-(-(seq_lens[live] - 1)"),
        ("np.arange(num_reqs + 1)", "np.zeros(num_reqs + 1, np.int32)"),
    ],
    "interpret": [
        ("tail <= max_num_reqs", "tail < max_num_reqs"),
        ("tl.int64), mask=tail < max_num_tokens", "tl.int64), mask=tail < 0"),
        ("tl.int32), mask=tail < max_num_reqs", "tl.int32), mask=tail < 0"),
        ("(offset < length) & (done + offset < known)", "(offset < length - 1) & (done + offset < known)"),
        ("in_prompt | (offset == length - 1)", "in_prompt | (offset < length)"),
        ("load(table + (done + offset) // block_size", "load(table + (done + offset + 1) // block_size"),
        ("(done + length + block_size - 1) // block_size", "(done + length) // block_size"),
        ("block.to(tl.int64) * block_size", "(block * block_size).to(tl.int64)"),
        ("(done + length + ahead < known)", "(ahead < known)"),
        ("tl.full((BLOCK,), -1, tl.int64), mask=offset", "tl.full((BLOCK,), 0, tl.int64), mask=offset"),
        ("tl.int32), mask=offset < stride", "tl.int32), mask=offset < 0"),
        ("        tl.store(idx_mapping + i, row)\n", ""),
    ],
}


def check_for_mutants(apply: Apply) -> None:
    check(apply, 5, (4, 16), 3, padded=2, holes=(1,), lookahead=2)
    beyond = {"sent_starts": torch.tensor([0, 3], dtype=torch.int32), "num_tokens": 3}
    args = arguments(1, (16,), 3) | beyond  # a decode with two tokens more, which are nobody's to fill
    expect(prepare_batch, apply, defined(args), **args)


@pytest.mark.parametrize(("backend", "bug"), [(name, bug) for name, bugs in MUTANTS.items() for bug in bugs])
def test_mutants_are_caught(backend: str, bug: tuple[str, str], tmp_path: Path) -> None:
    if backend == "interpret" and importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    broken = mutant(prepare_batch, *bug, tmp_path)
    assert caught(check_for_mutants, implementation(broken, backend))  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_no_mutant_passes(backend: str) -> None:
    check_for_mutants(implementation(prepare_batch, backend))  # type: ignore[arg-type]
