"""One schedule, three metadata objects: what each attention backend makes of the same step, read back for looking."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pandas as pd
import torch

from mrv2lab.attention import (
    FlashInferBackend,
    FlashInferMetadata,
    PagedAttentionMetadata,
    TorchAttentionMetadataBuilder,
    TritonAttentionMetadataBuilder,
)
from mrv2lab.config import KVGroup
from mrv2lab.engine.engine import Engine
from mrv2lab.protocol import CommonAttentionMetadata
from mrv2lab.runtime.base import Runtime

Ints = np.ndarray[Any, np.dtype[np.int32]]


class PlansOnly:
    """Stands in for the module flashinfer: its wrappers take plans and drop them, so that its metadata can be looked at
    where it is not installed, or there is no GPU."""

    class _Wrapper:
        def __init__(self, *args: Any, **options: Any) -> None:
            pass

        def plan(self, *args: Any, **options: Any) -> None:
            """Takes anything."""

    BatchDecodeWithPagedKVCacheWrapper = _Wrapper
    BatchPrefillWithPagedKVCacheWrapper = _Wrapper


@dataclass(frozen=True)
class StepMetadata:
    """What the backends made for one KV-cache group in one step; everything is on the host."""

    group: KVGroup
    block_size: int
    # [r] int32: this step's tokens included
    seq_lens: Ints
    # [r] int32: of this step
    query_lens: Ints
    # [r, B] int32, with what is stale
    block_table: Ints
    # [N] int32 and [r + 1] int32: flashinfer's pages and where each request's begin
    page_indices: Ints
    page_starts: Ints
    table: pd.DataFrame
    """A row a field, a column a backend."""

    def first_visible_page(self) -> list[int]:
        """The column of each request's first block that a query of this step can see."""
        if self.group.window is None:
            return [0] * len(self.seq_lens)
        first = np.maximum(self.seq_lens - self.query_lens - self.group.window + 1, 0) // self.block_size
        return [int(one) for one in first]

    def pages_in_use(self) -> list[int]:
        """Blocks of each request, those behind the window counted in."""
        return [int(one) for one in -(-self.seq_lens // self.block_size)]


def metadata_of_next_step(engine: Engine) -> tuple[StepMetadata, ...]:
    """Take one step and show what each backend's builder makes of it, one object a KV-cache group.

    Whatever backend the engine itself uses goes on using its own. Reading waits for the device: for looking. Raises
    ``ValueError`` for V1 and for a step that built no metadata: one without tokens, or the replay of a full graph.
    """
    if engine.config.runner.runner != "mrv2":
        raise ValueError("the builders are tapped in the MRV2 runner; use runner='mrv2'")
    with _tapped(engine.worker.runner.forward_pass) as seen:
        engine.step()
    groups = engine.config.model.kv_groups
    if len(seen) != len(groups):
        raise ValueError(
            f"the step built metadata for {len(seen)} of {len(groups)} KV-cache groups: it had no tokens, or replayed "
            "a full graph, whose metadata was built when it was captured; use cudagraph_mode='none'"
        )
    rt = engine.rt
    flashinfer = FlashInferBackend(rt, engine.config, PlansOnly, workspace_bytes=1)
    torch_builder, triton_builder = TorchAttentionMetadataBuilder(), TritonAttentionMetadataBuilder()
    made = []
    for group, common in zip(groups, seen, strict=True):
        paged = {"torch": torch_builder.build(common), "triton": triton_builder.build(common)}
        plan = flashinfer.builder(group).build(common)
        made.append(_read(rt, group, engine.config.cache.block_size, common, paged, plan))
    return tuple(made)


class _Tap:
    def __init__(self, inner: Any, seen: list[CommonAttentionMetadata]) -> None:
        self.inner, self.seen, self.name = inner, seen, inner.name

    def build(self, common: CommonAttentionMetadata) -> Any:
        self.seen.append(common)
        return self.inner.build(common)


@contextmanager
def _tapped(forward_pass: Any) -> Iterator[list[CommonAttentionMetadata]]:
    seen: list[CommonAttentionMetadata] = []
    before = forward_pass.builders
    forward_pass.builders = tuple(_Tap(builder, seen) for builder in before)
    try:
        yield seen
    finally:
        forward_pass.builders = before


def _read(
    rt: Runtime,
    group: KVGroup,
    block_size: int,
    common: CommonAttentionMetadata,
    paged: dict[str, PagedAttentionMetadata],
    plan: FlashInferMetadata,
) -> StepMetadata:
    def host(tensor: torch.Tensor) -> Ints:
        made: Ints = rt.read(tensor).numpy()
        return made

    columns: dict[str, dict[str, str]] = {}
    every: dict[str, PagedAttentionMetadata | FlashInferMetadata] = {**paged, "flashinfer": plan}
    for name, metadata in every.items():
        values = {field.name: getattr(metadata, field.name) for field in fields(metadata)}
        columns[name] = {field: _cell(rt, value) for field, value in values.items()}
    names = list(dict.fromkeys(field for column in columns.values() for field in column))
    cells = {name: [column.get(field, "") for field in names] for name, column in columns.items()}
    return StepMetadata(
        group=group,
        block_size=block_size,
        seq_lens=host(common.seq_lens),
        query_lens=np.diff(common.query_start_loc_np).astype(np.int32),
        block_table=host(common.block_table),
        page_indices=host(plan.page_indices),
        page_starts=plan.indptr_np,
        table=pd.DataFrame(cells, index=pd.Index(names, name="field")),
    )


def _cell(rt: Runtime, value: Any) -> str:
    """Kind, shape, place and the first values."""
    if isinstance(value, torch.Tensor):
        array, place = rt.read(value).numpy(), "device"
    elif isinstance(value, np.ndarray):
        array, place = value, "host"
    else:
        return str(value)
    shape = " x ".join(map(str, array.shape))
    return f"{array.dtype}[{shape}], {place}: {_some(array.ravel().tolist())}"


def _some(values: Sequence[int], most: int = 8) -> str:
    return ", ".join(map(str, values[:most])) + (", ..." if len(values) > most else "")
