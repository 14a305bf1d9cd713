"""From a batch to hidden states: which inputs a step's graph reads, or eagerly, unpadded. Counterparts in vLLM:
``prepare_attn`` and ``execute_model`` of ``v1/worker/gpu/model_runner.py``.

| decision | tokens | attention metadata | launched by |
|---|---|---|---|
| full | padded | of the padded requests, made once a graph | one replay |
| piecewise | padded | of the requests there are (vLLM #36626) | the decoder, its pieces replayed |
| eager | as many as there are | of the requests there are | the decoder |

What a padded step reads behind the batch is harmless: slots are -1, sequences are empty, query_start_loc is flat, block
rows are null, and token ids and positions are those of an earlier step.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from mrv2lab.attention import AttentionBackend
from mrv2lab.config import EngineConfig
from mrv2lab.graphs import BatchDescriptor, CudaGraphManager, Decision, DispatchTable
from mrv2lab.protocol import CommonAttentionMetadata, ForwardInputs, Model
from mrv2lab.runtime.base import Runtime
from mrv2lab.state import BlockTables, HostBatch, InputBatch, InputBuffers


class ForwardPass:
    """Attention's builders, one a KV-cache group, and the graphs of one decoder."""

    def __init__(
        self,
        config: EngineConfig,
        rt: Runtime,
        attention: AttentionBackend,
        buffers: InputBuffers,
        block_tables: BlockTables,
    ) -> None:
        self.rt = rt
        self.buffers = buffers
        self.block_tables = block_tables
        self.max_model_len = config.scheduler.max_model_len
        self.builders = tuple(attention.builder(group) for group in config.model.kv_groups)
        table = DispatchTable(
            config.graphs, config.scheduler, full_graphs=attention.full_graphs, backend=attention.name
        )
        self.graphs = CudaGraphManager(rt, table)
        self.replay = True
        """False = what a graph would replay is launched eagerly over the same padded inputs: for comparing the two."""
        self._full: dict[BatchDescriptor, ForwardInputs] = {}

    def dispatch(self, host: HostBatch) -> Decision:
        """The step's graph, or eager, and why. A phase of its own only where there are graphs."""
        reqs, tokens = len(host.req_ids), host.num_tokens
        shape = reqs, tokens, 1 if reqs == tokens else int(host.num_scheduled_tokens.max())
        if not self.graphs.table.sizes:
            return self.graphs.table.dispatch(*shape)
        with self.rt.observer.span("dispatch"):
            decision = self.graphs.dispatch(*shape)
            self.rt.observer.gauge("graph_tokens", decision.padded_tokens or 0)
            return decision

    def inputs(
        self, batch: InputBatch, decision: Decision, tables: tuple[torch.Tensor, ...], slots: torch.Tensor
    ) -> ForwardInputs:
        """The decoder's inputs. ``tables`` G x [>= r, B_g] and ``slots`` [G, T] as :class:`BlockTables` fills them."""
        descriptor = decision.descriptor
        if descriptor is None:
            return ForwardInputs(
                batch.input_ids, batch.positions, self._metadata(batch, batch.host.num_tokens, tables, slots)
            )
        if descriptor.mode == "full":
            return self.full_inputs(descriptor)
        tokens, buffers = descriptor.num_tokens, self.buffers
        metadata = self._metadata(batch, tokens, tables, slots)
        return ForwardInputs(buffers.input_ids[:tokens], buffers.positions[:tokens], metadata)

    def run(self, model: Model, decision: Decision, inputs: ForwardInputs) -> None:
        """Queue the forward pass; the hidden states are the decoder's."""
        descriptor = decision.descriptor
        if descriptor is not None and descriptor.mode == "full" and self.replay:
            self.graphs.replay(descriptor)
            return
        with self._pieces(descriptor):
            model.forward(inputs)

    def _pieces(self, descriptor: BatchDescriptor | None) -> AbstractContextManager[None]:
        if descriptor is None or descriptor.mode == "full" or not self.replay:
            return nullcontext()
        return self.graphs.piecewise(descriptor)

    def full_inputs(self, descriptor: BatchDescriptor) -> ForwardInputs:
        """What a full graph reads: views of the persistent buffers at its padded shape, made once. Host bounds are the
        widest, since a graph freezes them."""
        found = self._full.get(descriptor)
        if found is None:
            found = self._full[descriptor] = self._make_full_inputs(descriptor)
        return found

    def _make_full_inputs(self, descriptor: BatchDescriptor) -> ForwardInputs:
        tokens, reqs, buffers = descriptor.num_tokens, descriptor.num_reqs, self.buffers
        assert reqs is not None, "full graphs have a number of requests"
        longest = descriptor.query_len or tokens
        common = [
            CommonAttentionMetadata(
                query_start_loc=buffers.query_start_loc.device[: reqs + 1],
                query_start_loc_np=np.minimum(np.arange(reqs + 1, dtype=np.int32) * longest, np.int32(tokens)),
                seq_lens=buffers.seq_lens[:reqs],
                seq_lens_np_upper_bound=np.full(reqs, self.max_model_len, np.int32),
                num_reqs=reqs,
                num_tokens=tokens,
                max_query_len=longest,
                max_seq_len=self.max_model_len,
                block_table=table[:reqs],
                slot_mapping=self.block_tables.slot_mappings[g, :tokens],
                any_lengths=descriptor.query_len is None,
            )
            for g, table in enumerate(self.block_tables.input_tables)
        ]
        return ForwardInputs(buffers.input_ids[:tokens], buffers.positions[:tokens], self._build(common))

    def _metadata(
        self, batch: InputBatch, tokens: int, tables: tuple[torch.Tensor, ...], slots: torch.Tensor
    ) -> tuple[Any, ...]:
        """Of the requests there are. Only the slots reach over the padded ``tokens``, -1 behind the batch."""
        host, reqs = batch.host, batch.num_reqs
        return self._build(
            [
                CommonAttentionMetadata(
                    query_start_loc=batch.query_start_loc[: reqs + 1],
                    query_start_loc_np=host.query_start_loc[: reqs + 1],
                    seq_lens=batch.seq_lens,
                    seq_lens_np_upper_bound=host.seq_lens_upper_bound,
                    num_reqs=reqs,
                    num_tokens=host.num_tokens,
                    max_query_len=int(host.num_scheduled_tokens.max()),
                    max_seq_len=int(host.seq_lens_upper_bound.max()),
                    block_table=table,
                    slot_mapping=slots[g, :tokens],
                )
                for g, table in enumerate(tables)
            ]
        )

    def _build(self, common: list[CommonAttentionMetadata]) -> tuple[Any, ...]:
        return tuple(builder.build(one) for builder, one in zip(self.builders, common, strict=True))
