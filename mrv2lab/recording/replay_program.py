"""What a recorded step did to the integer state: publishes, uploads and op calls, in the order of the device.

Mirrors ``runner/model_runner.py`` and ``runner/prepare.py`` for the ops with NumPy specs; nothing else in a step writes
integer state. Sampling itself is floating-point: its tokens come from the record. Letters as in the GLOSSARY.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mrv2lab.ops._op import Op
from mrv2lab.ops.apply_write import apply_write
from mrv2lab.ops.combine_tokens import combine_tokens
from mrv2lab.ops.fused_apply_write import fused_apply_write
from mrv2lab.ops.gather_block_tables import gather_block_tables
from mrv2lab.ops.num_sampled import num_sampled_and_rejected
from mrv2lab.ops.pos_seq_lens import pos_seq_lens
from mrv2lab.ops.post_update import post_update
from mrv2lab.ops.prefill_inputs import prefill_inputs
from mrv2lab.ops.slot_mapping import slot_mapping
from mrv2lab.recording.schema import Array, Diff, Publish, StepRecord


@dataclass
class OpCall:
    """One launch of a step: what its spec is given."""

    phase: str
    op: Op
    args: dict[str, Any]
    """Parameter name -> array, tuple of arrays, or scalar, in the order of the spec's parameters."""
    tables: dict[str, str | tuple[str, ...]] = field(default_factory=dict)
    """Parameter name -> name of the table that was passed, or of each in a tuple. Only tables are in here."""

    @property
    def name(self) -> str:
        """Name of the op."""
        return self.op.name

    def run(self) -> None:
        """Let the spec do it, in place."""
        self.op.spec(*self.args.values())

    def copy(self) -> OpCall:
        """The same call on copies of its arrays; pointer arrays point at the copies."""
        args = {name: _copied(value) for name, value in self.args.items()}
        for pointers, tables in POINTERS.items():
            if pointers in args:
                args[pointers] = _addresses(args[tables])
        return OpCall(self.phase, self.op, args, dict(self.tables))


POINTERS = {"table_ptrs": "tables", "input_ptrs": "input_tables"}
"""Parameters that hold addresses, and whose."""
STAGED_TOGETHER = ("all_token_ids", "total_len", "num_computed_tokens")
"""Tables whose staged diffs one launch applies; another one those of the block tables."""


def staged_together(table: str) -> bool:
    """Whether the staged diffs of ``table`` go with those of other tables."""
    return table in STAGED_TOGETHER or table.startswith("block_table.")


def _copied(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_copied(item) for item in value)
    return value.copy() if isinstance(value, np.ndarray) else value


def _addresses(tables: Iterable[Array]) -> Array:
    return np.array([table.__array_interface__["data"][0] for table in tables], np.uint64)


@dataclass
class State:
    """The integer state between two steps, exactly as on the device."""

    tables: dict[str, Array]
    block_sizes: tuple[int, ...]
    """Tokens a block, one entry a KV-cache group."""
    owners: dict[str, int] = field(default_factory=dict)
    """Live request -> row, in the order of admission."""
    num_dirty_rows: int = 0
    """Rows of ``input_block_table`` that the latest gather filled."""

    @property
    def num_groups(self) -> int:
        """KV-cache groups."""
        return len(self.block_sizes)

    def group(self, name: str) -> tuple[Array, ...]:
        """The tables ``name.0``, ``name.1``, ... of all KV-cache groups."""
        return tuple(self.tables[f"{name}.{g}"] for g in range(self.num_groups))

    def restart(self, keyframe: dict[str, Array], owners: dict[str, int]) -> None:
        """Take over whole tables that were read from the device."""
        for name, values in keyframe.items():
            self.tables[name][:] = np.asarray(values).reshape(self.tables[name].shape)
        self.owners = dict(owners)
        # A gather leaves blocks in the rows of its batch and zeros behind them, and no block is 0.
        self.num_dirty_rows = max(_last_filled_row(table) + 1 for table in self.group("input_block_table"))

    def move_rows(self, record: StepRecord) -> None:
        """Free the rows of those who are gone, then seat those who came."""
        for req_id, _ in record.removed:
            self.owners.pop(req_id, None)
        for request in record.new:
            self.owners[request.req_id] = request.row


def _last_filled_row(table: Array) -> int:
    filled = np.flatnonzero(table.any(axis=1))
    return int(filled[-1]) if len(filled) else -1


def num_reqs(record: StepRecord) -> int:
    """Requests in the step's batch; 0 for a step that only told the runner who is gone."""
    return len(record.rows)


def host_writes(state: State, record: StepRecord) -> Iterator[Publish | OpCall]:
    """Phase ``apply_writes``: what the host published, and the launches that apply what it staged.

    A published table is what kernels queued from then on read, under whichever transfer policy.
    """
    yield from record.publishes
    by_table: dict[str, list[Diff]] = {}
    for diff in record.diffs:
        by_table.setdefault(diff.table, []).append(diff)
    for name, diffs in by_table.items():
        if not staged_together(name):
            table = _matrix(state.tables[name])
            args = (table, *_packed(diffs, table.dtype))
            yield OpCall("apply_writes", apply_write, _bind(apply_write, args), {"table": name})
    for names in (STAGED_TOGETHER, tuple(f"block_table.{g}" for g in range(state.num_groups))):
        together = tuple(name for name in names if name in by_table)
        if together:
            fused = [(g, diff) for g, name in enumerate(together) for diff in by_table[name]]
            tables = tuple(_matrix(state.tables[name]) for name in together)
            groups = np.array([g for g, _ in fused], np.int32)
            packed = _packed([diff for _, diff in fused], np.dtype(np.int32))
            bound = _bind(fused_apply_write, (tables, _addresses(tables), _strides(tables), groups, *packed))
            yield OpCall("apply_writes", fused_apply_write, bound, {"tables": together})


def _matrix(table: Array) -> Array:
    """The table itself, or [R, 1] of one with a value a row."""
    return table if table.ndim > 1 else table.reshape(-1, 1)


def _bind(op: Op, args: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(op.params, args, strict=True))


def _packed(diffs: list[Diff], dtype: np.dtype[Any]) -> tuple[Any, ...]:
    """rows [w], starts [w], cu_lens [w + 1], contents, w and the greatest length, as ``PackedDiffs`` sends them."""
    lengths = [len(diff.values) for diff in diffs]
    cu_lens = np.zeros(len(diffs) + 1, np.int32)
    np.cumsum(lengths, out=cu_lens[1:])
    return (
        np.array([diff.row for diff in diffs], np.int32),
        np.array([diff.start for diff in diffs], np.int32),
        cu_lens,
        np.concatenate([diff.values for diff in diffs]).astype(dtype),
        len(diffs),
        max(lengths),
    )


def _strides(tables: tuple[Array, ...]) -> Array:
    return np.array([table.shape[1] for table in tables], np.int64)


def input_calls(state: State, record: StepRecord) -> Iterator[OpCall]:
    """Phases ``prepare_inputs`` and ``gather`` of a batch that is not empty."""
    tables, count = state.tables, num_reqs(record)
    query_start_loc = tables["query_start_loc"]
    tables["idx_mapping"][:count] = record.rows
    query_start_loc[0] = 0
    np.cumsum(record.num_scheduled, out=query_start_loc[1 : count + 1])
    query_start_loc[count + 1 :] = query_start_loc[count]

    if record.has_prefill:
        yield _batch_call("prepare_inputs", prefill_inputs, state, count)
    yield _batch_call("prepare_inputs", pos_seq_lens, state, count)
    # Nobody has drafts yet: a request has one logits row, and the expanded mapping is idx_mapping itself.
    yield _batch_call("prepare_inputs", combine_tokens, state, count)
    block_tables, input_tables = state.group("block_table"), state.group("input_block_table")
    num_rows = max(count, state.num_dirty_rows)
    state.num_dirty_rows = count
    grouped = {
        "tables": block_tables,
        "table_ptrs": _addresses(block_tables),
        "input_tables": input_tables,
        "input_ptrs": _addresses(input_tables),
        "table_strides": _strides(block_tables),
        "num_rows": num_rows,
        "block_sizes": np.array(state.block_sizes, np.int32),
    }
    yield _batch_call("gather", gather_block_tables, state, count, **grouped)
    yield _batch_call("gather", slot_mapping, state, count, **grouped)


def output_calls(state: State, record: StepRecord) -> Iterator[OpCall]:
    """Phases ``sample`` and ``postprocess``, once the step's tokens are known."""
    assert record.sampled is not None
    lengths = [len(tokens) for tokens in record.sampled]
    sampled = np.zeros((len(lengths), max(1, *lengths)), np.int64)
    for i, tokens in enumerate(record.sampled):
        sampled[i, : len(tokens)] = tokens
    # What the sampler says, before the unfinished prefills among them are corrected to 0.
    num_sampled = np.array([max(length, 1) for length in lengths], np.int32)
    count = num_reqs(record)
    yield _batch_call("sample", num_sampled_and_rejected, state, count, num_sampled=num_sampled)
    yield _batch_call("postprocess", post_update, state, count, sampled_tokens=sampled, num_sampled=num_sampled)


def _batch_call(phase: str, op: Op, state: State, count: int, **others: Any) -> OpCall:
    """A launch over the step's batch. Parameters that are tables of the same name need not be said."""
    given = others | {
        "idx_mapping": state.tables["idx_mapping"][:count],
        "cu_num_logits": np.arange(count + 1, dtype=np.int32),
        "num_reqs": count,
    }
    args = {name: given[name] if name in given else state.tables[name] for name in op.params}
    return OpCall(phase, op, args, {name: name for name in args if name not in given})
