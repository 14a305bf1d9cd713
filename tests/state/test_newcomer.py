"""What a newcomer's staged writes cost a step."""

from __future__ import annotations

import pytest

from mrv2lab.runtime.base import Runtime
from mrv2lab.runtime.transfer import POLICIES
from mrv2lab.state import BlockTables, RequestState
from tests.runtime.machines import log, marks
from tests.state.requests import request
from tests.state.test_request_state import SAFE, of_row


@pytest.mark.parametrize("policy", SAFE)
def test_a_newcomer_costs_two_uploads_of_diffs_and_two_launches(rt: Runtime, policy: str) -> None:
    """Of the request's tables and of its blocks; a step that only adds blocks costs one of each."""
    transfers = POLICIES[policy](rt)
    state = RequestState(rt, transfers, max_num_reqs=8, max_model_len=16)
    tables = BlockTables(rt, transfers, max_num_reqs=8, max_model_len=16, block_sizes=(4, 8), max_num_batched_tokens=16)
    row = state.add_request(request("a", [7, 8, 9]))
    tables.append_block_ids(row, ([3], [2]), overwrite=True)
    tables.append_block_ids(1, ([5, 6], [4]), overwrite=True)
    log(rt).clear()
    state.apply_staged_writes()
    tables.apply_staged_writes()
    assert [(mark.name, mark.writes) for mark in marks(rt, "kernel")] == [
        ("fused_apply_write", ("all_token_ids", "total_len", "num_computed_tokens")),
        ("fused_apply_write", ("block_table.0", "block_table.1")),
    ]
    sent = marks(rt, "publish" if policy == "uva_pool" else "h2d")
    assert sum("diffs" in mark.name for mark in sent) == 2
    assert log(rt).waits() == []
    assert (state.staged(), tables.staged()) == ({}, {})
    assert of_row(rt, state, row)["all_token_ids"] == [7, 8, 9]
    assert [rt.read(table.gpu)[1, :2].tolist() for table in tables.row_tables] == [[5, 6], [4, 0]]
    assert rt.read(tables.num_blocks.gpu)[:, [1, row]].tolist() == [[2, 1], [1, 1]]
    log(rt).clear()
    tables.append_block_ids(1, ([8], []), overwrite=False)
    state.apply_staged_writes()
    tables.apply_staged_writes()
    assert [mark.writes for mark in marks(rt, "kernel")] == [("block_table.0",)]
