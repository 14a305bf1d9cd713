"""Every padding duty, and a mutant that forgets it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from mrv2lab.graphs.padding import padding_faults
from mrv2lab.runtime.cpu import CpuRuntime

REQS, TOKENS = 2, 3


def _inputs(cpu: CpuRuntime) -> dict[str, torch.Tensor]:
    """2 requests with 3 tokens, padded to 4 and 6."""
    values = {
        "query_start_loc": torch.tensor([0, 2, 3, 3, 3], dtype=torch.int32),
        "seq_lens": torch.tensor([9, 5, 0, 0], dtype=torch.int32),
        "block_table": torch.tensor([[4, 7], [5, 0], [0, 0], [0, 0]], dtype=torch.int32),
        "slot_mapping": torch.tensor([64, 65, 80, -1, -1, -1]),
    }
    return {name: cpu.adopt(value, name) for name, value in values.items()}


def test_a_step_that_is_padded_well(cpu: CpuRuntime) -> None:
    assert padding_faults(cpu, REQS, TOKENS, **_inputs(cpu)) == []


def _stale_slot(buffers: dict[str, torch.Tensor]) -> None:
    buffers["slot_mapping"][4] = 81


def _stale_length(buffers: dict[str, torch.Tensor]) -> None:
    buffers["seq_lens"][3] = 8


def _stale_start(buffers: dict[str, torch.Tensor]) -> None:
    buffers["query_start_loc"][3] = 4


def _stale_row(buffers: dict[str, torch.Tensor]) -> None:
    buffers["block_table"][2, 1] = 6


@pytest.mark.parametrize(
    ("mutant", "fault"),
    [
        (_stale_slot, "slot_mapping[4] is 81, but padding must hold -1"),
        (_stale_length, "seq_lens[3] is 8, but padding must hold 0"),
        (_stale_start, "query_start_loc[3] is 4, but padding must hold 3"),
        (_stale_row, "row 2 of the block table holds blocks [6], but padding must hold the null block 0"),
    ],
    ids=lambda value: getattr(value, "__name__", "")[1:],
)
def test_a_duty_that_is_forgotten(
    cpu: CpuRuntime, mutant: Callable[[dict[str, torch.Tensor]], None], fault: str
) -> None:
    buffers = _inputs(cpu)
    mutant({name: cpu.raw(buffer) for name, buffer in buffers.items()})
    assert padding_faults(cpu, REQS, TOKENS, **buffers) == [fault]


def test_a_step_without_padding_has_no_tails(cpu: CpuRuntime) -> None:
    buffers = _inputs(cpu)
    exact = {
        "query_start_loc": buffers["query_start_loc"][: REQS + 1],
        "seq_lens": buffers["seq_lens"][:REQS],
        "block_table": buffers["block_table"][:REQS],
        "slot_mapping": buffers["slot_mapping"][:TOKENS],
    }
    assert padding_faults(cpu, REQS, TOKENS, **exact) == []
