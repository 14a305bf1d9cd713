"""From a batch to the decoder's inputs: attention metadata, and the views of a padded step.

| mode | tokens | attention metadata |
|---|---|---|
| FULL | padded | of the padded requests |
| PIECEWISE | padded | of the requests there are, slots apart |
| NONE | as many as there are | of the requests there are |

V1 makes the metadata in every step, also for a FULL graph, which reads only the addresses it was captured with.
Counterpart in vLLM: ``GPUModelRunner._build_attention_metadata`` in ``v1/worker/gpu_model_runner.py``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mrv2lab.attention import AttentionBackend
from mrv2lab.config import EngineConfig
from mrv2lab.protocol import CommonAttentionMetadata, ForwardInputs
from mrv2lab.runner_v1.graph_dispatcher import Decision, GraphKey
from mrv2lab.runner_v1.prepare import InputPreparation, Int32, StepBatch


class InputsBuilder:
    """Attention's builders, one a KV-cache group."""

    def __init__(self, config: EngineConfig, attention: AttentionBackend, prepared: InputPreparation) -> None:
        self.builders = tuple(attention.builder(group) for group in config.model.kv_groups)
        self.prepared = prepared
        self._max_model_len = config.scheduler.max_model_len
        self._views: dict[GraphKey, tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]] = {}
        """Padded input ids [t], positions [t] and slots G x [t]."""
        self._full: dict[GraphKey, dict[str, Any]] = {}
        """What the padded metadata of a FULL key has besides the step's host arrays."""

    def build(self, batch: StepBatch, decision: Decision) -> ForwardInputs:
        """What the decoder is given. A padded step's tails must be neutral already (``InputPreparation.pad``)."""
        key = decision.key
        if key is None:
            common = self._common(batch)
            metadata = self._metadata(common, batch.block_tables, batch.slot_mappings)
            return ForwardInputs(batch.input_ids, batch.positions, metadata)
        input_ids, positions, slots = self._padded(key)
        if key.num_reqs is None:
            return ForwardInputs(input_ids, positions, self._metadata(self._common(batch), batch.block_tables, slots))
        common = self._full_common(key) | self._host_arrays(batch, key.num_reqs)
        tables = tuple(table[: key.num_reqs] for table in self.prepared.batch.block_table.gpu)
        return ForwardInputs(input_ids, positions, self._metadata(common, tables, slots))

    def _common(self, batch: StepBatch) -> dict[str, Any]:
        host = batch.host
        return {
            "query_start_loc": batch.query_start_loc,
            "query_start_loc_np": host.query_start_loc,
            "seq_lens": batch.seq_lens,
            "seq_lens_np_upper_bound": host.seq_lens_upper_bound,
            "num_reqs": batch.num_reqs,
            "num_tokens": host.num_tokens,
            "max_query_len": int(host.num_scheduled_tokens.max()),
            "max_seq_len": int(host.seq_lens_upper_bound.max()),
        }

    def _full_common(self, key: GraphKey) -> dict[str, Any]:
        """The device's arrays at the padded shape, and the widest bounds, since a graph freezes them."""
        found = self._full.get(key)
        if found is None:
            reqs = key.num_reqs
            assert reqs is not None
            found = self._full[key] = {
                "query_start_loc": self.prepared.query_start_loc.gpu[: reqs + 1],
                "seq_lens": self.prepared.seq_lens[:reqs],
                "num_reqs": reqs,
                "num_tokens": key.num_tokens,
                "max_query_len": key.num_tokens // reqs if key.uniform else key.num_tokens,
                "max_seq_len": self._max_model_len,
                "any_lengths": not key.uniform,
            }
        return found

    def _host_arrays(self, batch: StepBatch, reqs: int) -> dict[str, Int32]:
        """The step's, padded to ``reqs`` requests of nothing."""
        count, host = batch.num_reqs, batch.host
        starts = np.full(reqs + 1, host.num_tokens, np.int32)
        starts[: count + 1] = host.query_start_loc
        lengths = np.zeros(reqs, np.int32)
        lengths[:count] = host.seq_lens_upper_bound
        return {"query_start_loc_np": starts, "seq_lens_np_upper_bound": lengths}

    def _padded(self, key: GraphKey) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
        found = self._views.get(key)
        if found is None:
            tokens, prepared = key.num_tokens, self.prepared
            slots = tuple(prepared.slot_mappings[g, :tokens] for g in range(len(self.builders)))
            found = self._views[key] = (prepared.input_ids.gpu[:tokens], prepared.positions[:tokens], slots)
        return found

    def _metadata(
        self, common: dict[str, Any], tables: tuple[torch.Tensor, ...], slots: tuple[torch.Tensor, ...]
    ) -> tuple[Any, ...]:
        return tuple(
            builder.build(CommonAttentionMetadata(**common, block_table=table, slot_mapping=mapping))
            for builder, table, mapping in zip(self.builders, tables, slots, strict=True)
        )
