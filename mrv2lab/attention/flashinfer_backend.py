"""The flashinfer backend, an extra: a CUDA library that compiles its kernels with nvcc when they are first planned.

It plans a step on the host: from the lengths it decides how to split the work over the SMs, and its kernels follow the
plan. So lengths must be exact on the host (no drafts), every step pays for a plan, and a graph would freeze one. Where
our kernels read a padded block table, flashinfer takes the pages as one list with row pointers; their ids are on the
device, where ``page_indices`` lays them out. Of a sliding group only the pages in the window are listed.

Counterpart in vLLM: ``v1/attention/backends/flashinfer.py``.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from mrv2lab.config import EngineConfig, KVGroup
from mrv2lab.ops.page_indices import page_indices
from mrv2lab.protocol import CommonAttentionMetadata
from mrv2lab.runtime.base import Event, Runtime

_WORKSPACE = 128 * 2**20
"""Bytes for partial results of split sequences: what flashinfer's documentation recommends."""
_KERNELS = "fa2"
"""Its "auto" takes FlashAttention-3 kernels on Hopper, which compile for minutes."""
_HEAD_DIMS = (64, 128, 256)
_MAX_PLAIN_GROUP = 4
"""Query heads a KV head up to which decoding goes without tensor cores."""

Ints = np.ndarray[Any, np.dtype[np.int32]]


def load_flashinfer(rt: Runtime, config: EngineConfig) -> Any:
    """The module. ``ValueError`` where it cannot serve ``config`` on ``rt``, ``ImportError`` if it is missing."""
    model = config.model
    if rt.device.type != "cuda":
        raise ValueError(f"attention='flashinfer' needs CUDA, but this runtime's device is {rt.device}; use 'torch'")
    if model.dtype == "float32":
        raise ValueError("attention='flashinfer' has no float32 kernels; use dtype='bfloat16' or attention='triton'")
    if model.head_dim not in _HEAD_DIMS:
        raise ValueError(
            f"attention='flashinfer' has kernels for head_dim {_HEAD_DIMS}, not {model.head_dim}; "
            "use attention='triton'"
        )
    try:
        return importlib.import_module("flashinfer")
    except ImportError as error:
        raise ImportError(
            f"attention='flashinfer' needs flashinfer ({error}); in a checkout: pip install -e '.[flashinfer]' (it "
            "compiles its kernels on first use and needs nvcc), or use attention='triton'"
        ) from error


@dataclass(frozen=True, slots=True)
class FlashInferMetadata:
    """One step's plan, as it was made on the host."""

    kind: Literal["decode", "prefill"]
    """Decode kernels where every request has one query, else those for chunks, decodes among them included."""
    # [r + 1] int32, host: request j's pages are page_indices[indptr[j]:indptr[j + 1]]
    indptr_np: Ints
    # [r] int32, host: the column of the block table that its first page comes from
    first_page_np: Ints
    # [r] int32, host: slots in use of its last page
    last_page_len_np: Ints
    # [r + 1] int32, host
    query_start_loc_np: Ints
    # [N] int32, device
    page_indices: torch.Tensor
    # [t] int64, device; -1 = write nothing
    slot_mapping: torch.Tensor
    plan: int
    """Which of the backend's plans it is."""

    @property
    def args(self) -> tuple[Any, ...]:
        """See :class:`AttentionMetadata`. A plan goes by its number: what is queued holds tensors and numbers."""
        return self.page_indices, self.plan


@dataclass(slots=True)
class _Plan:
    """A pair of wrappers, and how the latest step that used them runs. Each has a page-locked buffer of its own, which
    the device reads when it gets there: so there are as many as steps in flight, and one, so that ``done`` has passed
    before its plan's next turn."""

    decode: Any
    prefill: Any
    # [2 R + 1] int32, page-locked: indptr, then first_page
    staging: torch.Tensor
    # behind everything of the latest step that used it; recorded when the next step is planned
    done: Event
    wrapper: Any = None
    num_tokens: int = 0


class FlashInferBuilder:
    """Plans one KV-cache group's attention. Waits only where ``len(plans)`` steps or more are in flight, which dummy
    runs between two steps can bring about."""

    name = "flashinfer"

    def __init__(
        self, backend: FlashInferBackend, config: EngineConfig, window: int | None, plans: range, label: str
    ) -> None:
        rt, scheduler = backend.rt, config.scheduler
        self._backend, self._rt, self._window, self._plans = backend, rt, window, plans
        self._block_size = config.cache.block_size
        self._next = 0
        pages = -(-scheduler.max_model_len // self._block_size)
        # [R * B] int32: the pages of the batch, without gaps
        self._indices = rt.zeros(scheduler.max_num_reqs * pages, torch.int32, name=f"{label}.page_indices")
        # [2 R + 1] int32
        self._device = rt.zeros(2 * scheduler.max_num_reqs + 1, torch.int32, name=f"{label}.page_rows")

    def build(self, common: CommonAttentionMetadata) -> FlashInferMetadata:
        """See :class:`AttentionMetadataBuilder`. Plans, which queues copies; the bounds are taken for the lengths."""
        r, size = common.num_reqs, self._block_size
        number, latest = self._plans[self._next], self._plans[self._next - 1]
        self._next = (self._next + 1) % len(self._plans)
        self._backend.plans[latest].done.record(self._rt.main)
        done = self._backend.plans[number].done
        if not done.query():
            done.synchronize()
        lengths = common.seq_lens_np_upper_bound[:r]
        queries = np.diff(common.query_start_loc_np[: r + 1])
        first = np.zeros(r, np.int32)
        if self._window is not None:
            np.floor_divide(np.maximum(lengths - queries - self._window + 1, 0), size, out=first)
        pages = -(-lengths // size) - first
        indptr = np.zeros(r + 1, np.int32)
        np.cumsum(pages, out=indptr[1:])
        last = np.where(lengths > 0, (lengths - 1) % size + 1, 0).astype(np.int32)
        plan = self._backend.plans[number]
        staged = plan.staging[: 2 * r + 1]
        self._rt.publish(staged, np.concatenate([indptr, first]))
        self._rt.h2d(self._device[: 2 * r + 1], staged)
        page_indices(
            self._rt, self._indices, common.block_table, self._device[: r + 1], self._device[r + 1 : 2 * r + 1], r
        )
        decode = common.max_query_len == 1 and common.num_tokens == r
        metadata = FlashInferMetadata(
            kind="decode" if decode else "prefill",
            indptr_np=indptr,
            first_page_np=first,
            last_page_len_np=last,
            query_start_loc_np=common.query_start_loc_np[: r + 1],
            page_indices=self._indices[: int(indptr[-1])],
            slot_mapping=common.slot_mapping,
            plan=number,
        )
        plan.num_tokens = common.num_tokens
        plan.wrapper = plan.decode if decode else plan.prefill
        self._backend.plan(plan.wrapper, metadata, self._window)
        return metadata


class FlashInferBackend:
    """``flashinfer``'s wrappers for paged caches. ``module`` is the library, as :func:`load_flashinfer` gives it.

    Raises ``ValueError`` for drafts: with them the host knows only bounds of the lengths.
    """

    name = "flashinfer"
    full_graphs = False

    def __init__(self, rt: Runtime, config: EngineConfig, module: Any, workspace_bytes: int = _WORKSPACE) -> None:
        if config.spec.num_speculative_tokens:
            raise ValueError(
                "attention='flashinfer' plans from the host's lengths, which are bounds while drafts are verified; "
                "set num_speculative_tokens=0 or use attention='triton'"
            )
        self.rt = rt
        self.plans: list[_Plan] = []
        self._config = config
        self._module = module
        self._depth = max(config.runner.pool_depth, config.scheduler.max_concurrent_steps) + 1
        model = config.model
        self._scale = model.head_dim**-0.5
        self._dtype: torch.dtype = getattr(torch, model.dtype)
        self._heads = model.num_attention_heads, model.num_key_value_heads, model.head_dim
        self._tensor_cores = model.num_attention_heads // model.num_key_value_heads > _MAX_PLAIN_GROUP
        # Its first use must find zeros; kernels of one stream share it.
        self._workspace = rt.raw(rt.zeros(workspace_bytes, torch.uint8, name="flashinfer.workspace"))

    def builder(self, group: KVGroup) -> FlashInferBuilder:
        """See :class:`AttentionBackend`. Makes the wrappers: 32 MiB a plan, half of it page-locked."""
        first, label = len(self.plans), f"flashinfer.{len(self.plans) // self._depth}"
        rows = 2 * self._config.scheduler.max_num_reqs + 1
        for i in range(first, first + self._depth):
            decode = self._module.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace, "NHD", use_tensor_cores=self._tensor_cores, backend=_KERNELS
            )
            prefill = self._module.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend=_KERNELS)
            staging = self.rt.empty(rows, torch.int32, name=f"flashinfer.staging.{i}", place="pinned")
            self.plans.append(_Plan(decode, prefill, staging, self.rt.event(f"flashinfer.done.{i}")))
        return FlashInferBuilder(self, self._config, group.window, range(first, first + self._depth), label)

    def plan(self, wrapper: Any, metadata: FlashInferMetadata, window: int | None) -> None:
        """Hand the step to flashinfer: host row pointers, device pages. Row i sees ``window_left`` keys and its own."""
        rows = [torch.from_numpy(metadata.query_start_loc_np)] if metadata.kind == "prefill" else []
        causal = {"causal": True} if metadata.kind == "prefill" else {}
        wrapper.plan(
            *rows,
            torch.from_numpy(metadata.indptr_np),
            metadata.page_indices,
            torch.from_numpy(metadata.last_page_len_np),
            *self._heads,
            self._config.cache.block_size,
            window_left=-1 if window is None else window - 1,
            sm_scale=self._scale,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
            **causal,
        )

    def attend(
        self,
        out: torch.Tensor,
        q: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        args: tuple[Any, ...],
        scale: float,
        window: int | None,
    ) -> None:
        """See :class:`AttentionBackend`. Scale and window are the plan's; rows behind the batch stay as they are."""
        plan = self.plans[args[1]]
        t = plan.num_tokens
        plan.wrapper.run(q[:t], (key_cache, value_cache), out=out[:t])
