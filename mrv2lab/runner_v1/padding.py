"""What a padded step reads behind its batch, made neutral before the replay: duties that nobody enforces, one by one.

| tail | must be | done by | forgotten in vLLM |
|---|---|---|---|
| slot_mapping | -1 | the slot kernel, which fills all of T | #36580: stale slots were overwritten |
| seq_lens | 0 | the length kernel, which fills all of R | attention read a finished request's keys |
| query_start_loc | flat | the host, which repeats the number of tokens | padding owned tokens |
| block rows | null | here: the copy brings only the batch's rows | #35431: somebody else's blocks were read |
| positions | 0 | here | |

Token ids stay those of an earlier step: ids that the embedding knows. Counterpart in vLLM: fills spread over
``_prepare_inputs``, ``_get_slot_mappings``, ``_build_attention_metadata`` and ``_preprocess`` of
``v1/worker/gpu_model_runner.py``.
"""

from __future__ import annotations

import torch

from mrv2lab.protocol import NULL_BLOCK
from mrv2lab.runner_v1.graph_dispatcher import GraphKey
from mrv2lab.runner_v1.prepare import InputPreparation, StepBatch


class TailPadding:
    """The last two duties of the table. Its launch goes behind every copy of the step."""

    def __init__(self, prepared: InputPreparation) -> None:
        self._prepared = prepared
        prepared.rt.register("v1.pad_tails", _pad_tails)

    def pad(self, batch: StepBatch, key: GraphKey) -> None:
        """Queue the fills for ``batch``, padded to ``key``; nothing where it has the key's shape."""
        total, count = batch.host.num_tokens, batch.num_reqs
        tokens, reqs = key.num_tokens, key.num_reqs or count
        if tokens > total or reqs > count:
            tables = self._prepared.batch.block_table.gpu if reqs > count else ()
            self._prepared.barrier.then(self._launch, tables, total, tokens, count, reqs)

    def _launch(self, tables: tuple[torch.Tensor, ...], total: int, tokens: int, count: int, reqs: int) -> None:
        positions = self._prepared.positions
        written = (positions, *tables)
        self._prepared.rt.run("v1.pad_tails", positions, tables, total, tokens, count, reqs, writes=written)


def _pad_tails(
    positions: torch.Tensor, tables: tuple[torch.Tensor, ...], total: int, tokens: int, count: int, reqs: int
) -> None:
    """Nobody's positions and block rows."""
    positions[total:tokens].zero_()
    for table in tables:
        table[count:reqs].fill_(NULL_BLOCK)
