"""Generated tokens of logits rows, gathered: committed outputs, then the drafts in front."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mrv2lab.ops.output_tokens import output_tokens
from tests.ops.backends import BACKENDS, CPU_BACKENDS, POISON, Apply, caught, expect, implementation, mutant
from tests.ops.test_count_tokens import int32


def check(apply: Apply, outputs: int = 3) -> None:
    """Request on row 2: prompt 5 6, ``outputs`` tokens, drafts 90 91; on row 0: prompt 7, nothing yet."""
    said = list(range(100, 100 + outputs))
    tokens = np.full((3, outputs + 5), 1)
    tokens[2, : 2 + outputs], tokens[0, 0] = [5, 6, *said], 7
    wanted = [[*said, 90], [], [*said, 90, 91], said]
    rows = [2, 0, 3, 1]
    starts = np.cumsum([0, *map(len, wanted)])
    total = int(starts[-1])
    expect(
        output_tokens,
        apply,
        {"out": int32([*np.concatenate(wanted).astype(int), POISON, POISON])},
        out=int32([POISON] * (total + 2)),
        starts=int32(starts),
        rows=int32(rows),
        expanded_idx_mapping=int32([0, 2, 2, 2]),
        local_pos=int32([0, 0, 1, 2]),
        logits_indices=torch.tensor([0, 1, 2, 3]),
        input_ids=int32([7, said[-1], 90, 91]),
        all_token_ids=int32(tokens),
        prompt_len=int32([1, 1, 2]),
        longest=outputs + 2,
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("outputs", [1, 3, 1030])
def test_output_tokens(backend, outputs):
    check(implementation(output_tokens, backend), outputs)


MUTANTS = {
    "spec": [
        ("starts[i + 1] - starts[i] - drafts", "starts[i + 1] - starts[i]"),
        ("input_ids[last - drafts : last]", "input_ids[last - drafts - 1 : last - 1]"),
        ("index = expanded_idx_mapping[row]", "index = expanded_idx_mapping[i]"),
    ],
    "interpret": [
        ("committed = length - tl.load(local_pos + row)", "committed = length"),
        ("+ 1 - length + j", "- length + j"),
        ("expanded_idx_mapping + row", "expanded_idx_mapping + i"),
    ],
}


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("bug", range(3))
def test_mutants(backend, bug, tmp_path):
    assert caught(check, implementation(mutant(output_tokens, *MUTANTS[backend][bug], tmp_path), backend))
