import numpy as np
import pytest
import torch

from mrv2lab.ops.slot_mapping import slot_mapping
from tests.ops.backends import (
    BACKENDS,
    CPU_BACKENDS,
    Apply,
    caught,
    expect,
    implementation,
    mutant,
    pointer_table,
    poisoned,
    run,
)
from tests.ops.batches import random_batch


def check(
    apply: Apply, num_reqs: int = 3, block_sizes: tuple[int, ...] = (4, 16), padding: int = 6, seed: int = 0
) -> None:
    """Row 23 of reference/mrv2.md 4.3: several groups, block sizes and table widths, against plain loops."""
    rng = np.random.default_rng(seed)
    b = random_batch(num_reqs, seed)
    widths = [-(-60 // size) for size in block_sizes]
    tables = tuple(torch.tensor(rng.integers(1, 2**28, (b.num_rows, w)), dtype=torch.int32) for w in widths)
    idx_mapping = b.idx_mapping.clone()
    positions, slots = poisoned(b.num_tokens + padding, dtype=torch.int64), []
    positions[:] = 0
    for g, size in enumerate(block_sizes):
        slots.append([])
        for i, row in enumerate(b.idx_mapping.tolist()):
            for position in range(int(b.num_computed_tokens[row]), int(b.seq_lens[i])):
                if g == 0:
                    positions[len(slots[0])] = position
                block, offset = divmod(position, size)
                slots[g].append(-1 if i == 2 else int(tables[g][row, block]) * size + offset)
        slots[g] += [-1] * padding
    idx_mapping[2:3] = -1
    expect(
        slot_mapping,
        apply,
        {"slot_mappings": torch.tensor(slots)},
        idx_mapping=idx_mapping,
        query_start_loc=b.query_start_loc,
        positions=positions,
        tables=tables,
        table_ptrs="tables",
        table_strides=torch.tensor(widths, dtype=torch.int64),
        block_sizes=torch.tensor(block_sizes, dtype=torch.int32),
        slot_mappings=poisoned(len(block_sizes), b.num_tokens + padding, dtype=torch.int64),
        num_reqs=num_reqs,
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("num_reqs", "block_sizes", "padding"),
    [(1, (16,), 0), (3, (4, 16), 6), (7, (8, 1), 1), (2, (16, 2, 32), 1500)],
    ids=str,
)
def test_equals_brute_force(num_reqs: int, block_sizes: tuple[int, ...], padding: int, backend: str) -> None:
    check(implementation(slot_mapping, backend), num_reqs, block_sizes, padding, seed=num_reqs)


def map_one(table: list[int], start: int, length: int, slots: torch.Tensor, backend: str) -> None:
    """Slots of one request, block size 16, into the one group's ``slots`` [1, T]."""
    positions = torch.zeros(slots.shape[1], dtype=torch.int64)
    positions[:length] = torch.arange(start, start + length)
    tables = (torch.tensor([table], dtype=torch.int32),)
    args = (
        torch.tensor([0], dtype=torch.int32),
        torch.tensor([0, length, length], dtype=torch.int32),
        positions,
        tables,
        pointer_table(tables),
        torch.tensor([len(table)]),
        torch.tensor([16], dtype=torch.int32),
        slots,
        1,
    )
    run(slot_mapping, args, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_golden_vector_a3(backend: str) -> None:
    slots = poisoned(1, 6, dtype=torch.int64)
    map_one([7, 3, 9], 15, 3, slots, backend)
    assert slots.tolist() == [[127, 48, 49, -1, -1, -1]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_slot_of_a_larger_step_stays_behind(backend: str) -> None:
    """Row 22 of reference/mrv2.md 4.3 (vLLM #36580): 100 tokens, then 5 padded to 8; slots[5:] must all be -1."""
    slots = poisoned(1, 128, dtype=torch.int64)
    map_one([1, 2, 3, 4, 5, 6, 7], 0, 100, slots, backend)
    assert slots[0, :100].tolist() == list(range(16, 116))
    map_one([9], 0, 5, slots, backend)
    assert slots.tolist() == [[144, 145, 146, 147, 148] + [-1] * 123]


MUTANTS = {
    "spec": [
        ("        slots[:] = -1\n", ""),
        ("table[idx_mapping[i], block]", "table[i, block]"),
        (".astype(np.int64)", ""),
    ],
    "interpret": [
        ("tl.where(live, slot, -1)", "slot"),
        ("range(start, max_num_tokens, BLOCK)", "range(start, start, BLOCK)"),
        ("block.to(tl.int64)", "block"),
    ],
}


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("bug", range(3))
def test_mutants_are_caught(backend: str, bug: int, tmp_path) -> None:
    assert caught(check, implementation(mutant(slot_mapping, *MUTANTS[backend][bug], tmp_path), backend))
