"""A look at a runner's rows as a frame."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd

from mrv2lab.runner import ModelRunner
from mrv2lab.runner_v1 import ModelRunnerV1
from mrv2lab.runtime.base import Runtime

Decode = Callable[[list[int]], str]


def rows_of(rt: Runtime, runner: ModelRunner | ModelRunnerV1, decode: Decode) -> pd.DataFrame:
    """One line a row in use, indexed by row. Synchronises."""
    lines = _v1_rows(rt, runner, decode) if isinstance(runner, ModelRunnerV1) else _mrv2_rows(rt, runner, decode)
    frame = pd.DataFrame(lines)
    return frame.set_index("row") if len(frame) else frame


def _mrv2_rows(rt: Runtime, runner: ModelRunner, decode: Decode) -> list[dict[str, Any]]:
    state, read = runner.req_states, rt.read
    total, computed = read(state.total_len.gpu).numpy(), read(state.num_computed_tokens.gpu).numpy()
    last, tokens = read(state.last_sampled_tokens).numpy(), read(state.all_token_ids.gpu)
    return [
        {
            "row": row,
            "request": req_id,
            "prompt_len": int(state.prompt_len.np[row]),
            "prefill_len": int(state.prefill_len.np[row]),
            "total_len": int(total[row]),
            "num_computed": int(computed[row]),
            "blocks": int(runner.block_tables.num_blocks.np[0, row]),
            "last_sampled": int(last[row]),
            "text": decode(tokens[row, : total[row]].tolist()),
        }
        for req_id, row in sorted(state.req_id_to_index.items(), key=lambda item: item[1])
    ]


def _v1_rows(rt: Runtime, runner: ModelRunnerV1, decode: Decode) -> list[dict[str, Any]]:
    rt.synchronize()
    batch = runner.input_batch
    lines = []
    for row, req_id in enumerate(batch.req_ids):
        tokens = batch.token_ids_cpu[row, : batch.num_tokens_no_spec[row]].tolist()
        lines.append(
            {
                "row": row,
                "request": req_id,
                "prompt_len": int(batch.num_prompt_tokens[row]),
                "total_len": len(tokens),
                "num_computed": int(batch.num_computed_tokens.np[row]),
                "blocks": int(batch.block_table[0].num_blocks_per_row[row]),
                "placeholders": tokens.count(-1),
                "text": decode(tokens),
            }
        )
    return lines
