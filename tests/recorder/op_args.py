"""Arguments for every integer op, small and random, and where each may load and what it may rewrite."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mrv2lab.recording.lens import LensRun
from tests.ops.batches import Batch, random_batch
from tests.ops.test_apply_write import staged

POISON = -7777

Cells = dict[str, set[int]]


@dataclass
class Case:
    """``may_load``: buffer -> flat indices that the op's docstring lets it read. ``rewritten``: cells that it writes
    although they may hold the value already (everything else that it writes is poisoned before)."""

    args: dict[str, Any]
    may_load: Cells
    rewritten: Cells = field(default_factory=dict)


def poisoned(*shape: int, dtype: Any = np.int32) -> Any:
    return np.full(shape, POISON, dtype)


def cells(array: Any, rows: Any, columns: range) -> set[int]:
    """Flat indices of ``columns`` of ``rows`` of a matrix."""
    return {int(row) * array.shape[1] + column for row in rows for column in columns}


def arrays(batch: Batch) -> dict[str, Any]:
    return {name: value.numpy() if hasattr(value, "numpy") else value for name, value in vars(batch).items()}


def case(name: str, seed: int) -> Case:
    """A batch of four requests, one of each kind: chunk, last chunk, padded prompt tail, decode."""
    return globals()[f"_{name}"](arrays(random_batch(4, seed)), np.random.default_rng(seed))


def _pick(batch: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: batch[name] for name in names}


def _batch_loads(batch: dict[str, Any], *names: str) -> Cells:
    """What a program of request i may read of the batch's arrays: its own entries, and its row's of the row tables."""
    r, rows = batch["num_reqs"], set(batch["idx_mapping"].tolist())
    sizes = {"idx_mapping": r, "query_start_loc": r + 1, "cu_num_logits": r + 1, "seq_lens": r}
    return {name: set(range(sizes[name])) if name in sizes else rows for name in names}


def _apply_write(batch: dict[str, Any], rng: Any) -> Case:
    args = staged([(3, 2, [5, 6, 7]), (0, 0, [1]), (1, 4, [])])
    loads = {name: set(range(3)) for name in ("rows", "starts")} | {"cu_lens": set(range(4)), "contents": set(range(4))}
    return Case({"table": poisoned(5, 8), **{k: getattr(v, "numpy", lambda v=v: v)() for k, v in args.items()}}, loads)


def _fused_apply_write(batch: dict[str, Any], rng: Any) -> Case:
    plain = _apply_write(batch, rng)
    del plain.args["table"]
    tables = {"tables": (poisoned(4, 8), poisoned(5, 6)), "group_ids": np.array([1, 0, 1], np.int32)}
    args = tables | plain.args | {"starts": np.array([2, 0, 4], np.int32)}
    return Case(args, plain.may_load | {"group_ids": {0, 1, 2}, "table_ptrs": {0, 1}, "table_strides": {0, 1}})


def _prefill_inputs(batch: dict[str, Any], rng: Any) -> Case:
    names = ("idx_mapping", "query_start_loc", "prefill_len", "num_computed_tokens")
    tokens, prefill = batch["all_token_ids"], batch["prefill_len"]
    known = {int(row) * tokens.shape[1] + c for row in batch["idx_mapping"] for c in range(prefill[row])}
    args = _pick(batch, *names[:2], "all_token_ids", *names[2:]) | {
        "input_ids": poisoned(batch["query_start_loc"][-1] + 3),
        "next_prefill_tokens": poisoned(2, len(prefill)),
        "num_reqs": 4,
    }
    return Case(args, _batch_loads(batch, *names) | {"all_token_ids": known})


def _pos_seq_lens(batch: dict[str, Any], rng: Any) -> Case:
    names = ("idx_mapping", "query_start_loc", "num_computed_tokens")
    args = _pick(batch, *names) | {"positions": poisoned(batch["query_start_loc"][-1] + 3, dtype=np.int64)}
    return Case(args | {"seq_lens": poisoned(8), "num_reqs": 4}, _batch_loads(batch, *names))


def _flat_pos_seq_lens(batch: dict[str, Any], rng: Any) -> Case:
    lengths, t = np.diff(batch["query_start_loc"])[:4], batch["query_start_loc"][-1]
    args = {
        "req_indices": np.repeat(np.arange(4), lengths),
        "query_pos": np.concatenate([np.arange(n) for n in lengths]),
        "num_computed_tokens": batch["num_computed_tokens"],
        "num_scheduled_tokens": np.append(lengths, [POISON] * 4).astype(np.int32),
        "positions": poisoned(t + 3, dtype=np.int64),
        "seq_lens": poisoned(8),
    }
    tokens = {name: set(range(t)) for name in ("req_indices", "query_pos")}
    requests = {name: set(range(4)) for name in ("num_computed_tokens", "num_scheduled_tokens")}
    return Case(args | {"num_tokens": int(t), "num_reqs": 4}, tokens | requests)


def _scatter_sampled(batch: dict[str, Any], rng: Any) -> Case:
    sampled = rng.integers(0, 1000, (6, 1))
    args = {"token_indices": np.array([0, 4, 7, POISON]), "prev_rows": np.array([5, 0, 2, POISON])}
    loads = {name: set(range(3)) for name in args} | {"prev_sampled": {5, 0, 2}}
    return Case(args | {"prev_sampled": sampled, "input_ids": poisoned(9), "count": 3}, loads)


def _checksum(batch: dict[str, Any], rng: Any) -> Case:
    table, lengths = batch["all_token_ids"], batch["total_len"]
    valid = {row * table.shape[1] + c for row in range(len(table)) for c in range(lengths[row])}
    args = {"table": table, "lengths": lengths, "out": poisoned(len(table), dtype=np.int64)}
    return Case(args, {"table": valid, "lengths": set(range(len(table)))})


def _combine_tokens(batch: dict[str, Any], rng: Any) -> Case:
    names = ("idx_mapping", "query_start_loc", "cu_num_logits", "seq_lens", "prefill_len", "last_sampled_tokens")
    drafts = batch["draft_tokens"]
    args = _pick(batch, *names) | {
        "draft_tokens": drafts,
        "input_ids": poisoned(batch["query_start_loc"][-1] + 3),
        "logits_indices": poisoned(batch["cu_num_logits"][-1] + 2, dtype=np.int64),
        "num_reqs": 4,
    }
    return Case(args, _batch_loads(batch, *names) | {"draft_tokens": cells(drafts, batch["idx_mapping"], range(2))})


def _expand_idx_mapping(batch: dict[str, Any], rng: Any) -> Case:
    names = ("idx_mapping", "cu_num_logits")
    n = batch["cu_num_logits"][-1]
    outputs = {"expanded_idx_mapping": poisoned(n + 2), "expanded_local_pos": poisoned(n + 2)}
    return Case(_pick(batch, *names) | outputs | {"num_reqs": 4}, _batch_loads(batch, *names))


def _num_sampled_and_rejected(batch: dict[str, Any], rng: Any) -> Case:
    names = ("idx_mapping", "seq_lens", "cu_num_logits", "prefill_len")
    sampled = rng.integers(1, np.diff(batch["cu_num_logits"]) + 1).astype(np.int32)
    args = _pick(batch, *names) | {"num_sampled": sampled, "num_rejected": poisoned(4), "num_reqs": 4}
    # num_sampled is corrected in place: where it was right it is written as it was
    return Case(args, _batch_loads(batch, *names) | {"num_sampled": set(range(4))}, {"num_sampled": set(range(4))})


def _num_sampled_without_drafts(batch: dict[str, Any], rng: Any) -> Case:
    names = ("idx_mapping", "seq_lens", "prefill_len")
    outputs = {"num_sampled": poisoned(4), "num_rejected": poisoned(4)}
    return Case(_pick(batch, *names) | outputs | {"num_reqs": 4}, _batch_loads(batch, *names))


def _post_update(batch: dict[str, Any], rng: Any) -> Case:
    rows = set(batch["idx_mapping"].tolist())
    k = np.array([0, 1, 3, 2], np.int32)
    args = _pick(batch, "idx_mapping", "query_start_loc") | {
        "sampled_tokens": rng.integers(1000, 2000, (4, 3)),
        "num_sampled": k,
        "num_rejected": np.array([0, 2, 0, 1], np.int32),
        "all_token_ids": batch["all_token_ids"],
        "last_sampled_tokens": batch["last_sampled_tokens"],
        "total_len": batch["total_len"],
        "num_computed_tokens": batch["num_computed_tokens"],
        "num_reqs": 4,
    }
    valid = {3 * i + j for i in range(4) for j in range(k[i])}
    loads = _batch_loads(batch, "idx_mapping", "query_start_loc", "total_len", "num_computed_tokens")
    loads |= {"sampled_tokens": valid, "num_sampled": set(range(4)), "num_rejected": set(range(4))}
    return Case(args, loads, {"num_computed_tokens": rows})


def _post_update_num_computed(batch: dict[str, Any], rng: Any) -> Case:
    names = ("idx_mapping", "query_start_loc", "num_computed_tokens")
    return Case(_pick(batch, *names) | {"num_reqs": 4}, _batch_loads(batch, *names))


def _tables(batch: dict[str, Any], rng: Any, width: int) -> tuple[Any, Any]:
    return tuple(rng.integers(1, 99, (len(batch["prefill_len"]), width)).astype(np.int32) for _ in range(2))


def _gather_block_tables(batch: dict[str, Any], rng: Any) -> Case:
    tables = _tables(batch, rng, 5)
    counts = rng.integers(0, 6, (2, len(tables[0]))).astype(np.int32)
    rows = batch["idx_mapping"].tolist()
    args = {
        "idx_mapping": batch["idx_mapping"],
        "num_blocks": counts,
        "tables": tables,
        "table_ptrs": np.zeros(2, np.uint64),  # of nothing: made anew
        "input_tables": (poisoned(8, 5), poisoned(8, 5)),
        "input_ptrs": np.zeros(2, np.uint64),
        "num_reqs": 4,
        "num_rows": 6,
    }
    loads = {f"tables[{g}]": {5 * row + c for row in rows for c in range(counts[g, row])} for g in range(2)}
    loads |= {name: {0, 1} for name in ("table_ptrs", "input_ptrs", "table_strides")}
    loads |= {"idx_mapping": set(range(4)), "num_blocks": cells(counts.T.copy().T, range(2), range(len(tables[0])))}
    return Case(args, loads)


def _page_indices(batch: dict[str, Any], rng: Any) -> Case:
    table = rng.integers(1, 50, (4, 6)).astype(np.int32)
    first, counts = np.array([0, 2, 5, 1], np.int32), np.array([3, 4, 0, 1], np.int32)
    indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    args = {"indices": poisoned(12), "block_table": table, "indptr": indptr, "first_page": first, "num_reqs": 4}
    pages = {6 * j + column for j in range(4) for column in range(first[j], first[j] + counts[j])}
    return Case(args, {"block_table": pages, "indptr": set(range(5)), "first_page": set(range(4))})


def _slot_mapping(batch: dict[str, Any], rng: Any) -> Case:
    starts, tables = batch["query_start_loc"], _tables(batch, rng, 12)
    positions = np.full(starts[-1] + 3, 10**6, np.int64)  # behind the step's tokens: not to be read
    for i, row in enumerate(batch["idx_mapping"]):
        done = batch["num_computed_tokens"][row]
        positions[starts[i] : starts[i + 1]] = np.arange(done, done + starts[i + 1] - starts[i])
    rows = batch["idx_mapping"].copy()
    rows[1] = -1
    args = {
        "idx_mapping": rows,
        "query_start_loc": starts,
        "positions": positions,
        "tables": tables,
        "block_sizes": np.array([4, 8], np.int32),
        "slot_mappings": poisoned(2, len(positions), dtype=np.int64),
        "num_reqs": 4,
    }
    live = cells(tables[0], [row for row in rows if row >= 0], range(12))
    loads = {"tables[0]": live, "tables[1]": live, "block_sizes": {0, 1}, "table_ptrs": {0, 1}, "table_strides": {0, 1}}
    loads |= {"idx_mapping": set(range(4)), "query_start_loc": set(range(5)), "positions": set(range(starts[-1]))}
    return Case(args, loads)


def _prepare_decode(batch: dict[str, Any], rng: Any) -> Case:
    """Four decodes, the second of nobody; six rows of the input tables, T = 7."""
    rows, tables = batch["idx_mapping"].copy(), _tables(batch, rng, 12)
    rows[1] = -1
    live = [int(row) for row in rows if row >= 0]
    done = batch["num_computed_tokens"]
    sizes = np.array([4, 8], np.int32)
    args = {
        "idx_mapping": rows,
        "num_computed_tokens": done,
        "last_sampled_tokens": batch["last_sampled_tokens"],
        "tables": tables,
        "input_tables": tuple(poisoned(8, 12) for _ in tables),
        "block_sizes": sizes,
        "query_start_loc": poisoned(9),
        "input_ids": poisoned(7),
        "positions": poisoned(7, dtype=np.int64),
        "seq_lens": poisoned(8),
        "logits_indices": poisoned(5, dtype=np.int64),
        "slot_mappings": poisoned(2, 7, dtype=np.int64),
        "num_reqs": 4,
        "num_rows": 6,
    }
    loads: Cells = {"idx_mapping": set(range(4)), "block_sizes": {0, 1}}
    loads |= {name: {0, 1} for name in ("table_ptrs", "input_ptrs", "table_strides")}
    loads |= {name: set(live) for name in ("num_computed_tokens", "last_sampled_tokens")}
    for g in (0, 1):
        blocks = {row: range(int(done[row]) // int(sizes[g]) + 1) for row in live}
        loads[f"tables[{g}]"] = set().union(*(cells(tables[g], [row], blocks[row]) for row in live))
    return Case(args, loads)


def _prepare_batch(batch: dict[str, Any], rng: Any) -> Case:
    """The four without drafts, the second of nobody; six rows of the input tables, three tokens behind the batch's."""
    rows, tables, starts = batch["idx_mapping"].copy(), _tables(batch, rng, 12), batch["query_start_loc"][:5]
    rows[1] = -1
    live = [int(row) for row in rows if row >= 0]
    done, tokens, prefill = batch["num_computed_tokens"], batch["all_token_ids"], batch["prefill_len"]
    sizes = np.array([4, 8], np.int32)
    args = _pick(batch, "num_computed_tokens", "prefill_len", "last_sampled_tokens", "all_token_ids") | {
        "sent_rows": rows,
        "sent_starts": starts,
        "tables": tables,
        "input_tables": tuple(poisoned(8, 12) for _ in tables),
        "block_sizes": sizes,
        "idx_mapping": poisoned(5),
        "query_start_loc": poisoned(9),
        "input_ids": poisoned(starts[-1] + 3),
        "next_prefill_tokens": poisoned(2, len(prefill)),
        "positions": poisoned(starts[-1] + 3, dtype=np.int64),
        "seq_lens": poisoned(8),
        "logits_indices": poisoned(5, dtype=np.int64),
        "slot_mappings": poisoned(2, starts[-1] + 3, dtype=np.int64),
        "num_reqs": 4,
        "num_tokens": int(starts[-1]),
        "num_rows": 6,
    }
    loads: Cells = {"sent_rows": set(range(4)), "sent_starts": set(range(5)), "block_sizes": {0, 1}}
    loads |= {name: {0, 1} for name in ("table_ptrs", "input_ptrs", "table_strides")}
    loads |= {name: set(live) for name in ("num_computed_tokens", "prefill_len", "last_sampled_tokens")}
    loads["all_token_ids"] = {row * tokens.shape[1] + c for row in live for c in range(prefill[row])}
    ends = {int(row): int(done[row] + starts[i + 1] - starts[i]) for i, row in enumerate(rows)}
    for g in (0, 1):
        loads[f"tables[{g}]"] = set().union(
            *(cells(tables[g], [row], range(-(-ends[row] // int(sizes[g])))) for row in live)
        )
    return Case(args, loads)


def _spin(batch: dict[str, Any], rng: Any) -> Case:
    return Case({"state": np.array([12345], np.int32), "rounds": 3}, {"state": {0}})


def _counts(rng: Any, rows: int = 4, vocab: int = 40) -> dict[str, Any]:
    """Tables of tokens seen, [R, ceil(V / 32)], and of how often each was generated, [R, V]."""
    counts = rng.integers(0, 5, (rows, vocab)).astype(np.int32)
    return {"prompt_bin_mask": np.zeros((rows, -(-vocab // 32)), np.int32), "output_bin_counts": counts}


def _zero_counts(batch: dict[str, Any], rng: Any) -> Case:
    tables = {name: np.full_like(table, POISON) for name, table in _counts(rng).items()}
    return Case({"rows": np.array([2, 0], np.int32)} | tables, {"rows": {0, 1}})


def _count_history(batch: dict[str, Any], rng: Any) -> Case:
    tokens = rng.permuted(np.tile(np.arange(40, dtype=np.int32), (4, 1)), axis=1)[:, :12]  # each once: all show
    prompt_len, prefill_len = np.array([3, 5, 7, 1], np.int32), np.array([9, 5, 8, 2], np.int32)
    args = {"rows": np.array([2, 0], np.int32), "all_token_ids": np.ascontiguousarray(tokens)}
    args |= {"prompt_len": prompt_len, "prefill_len": prefill_len} | _counts(rng) | {"longest": 9}
    known = {row * 12 + column for row in (2, 0) for column in range(prefill_len[row])}
    touched = {
        "prompt_bin_mask": {row * 2 + int(tokens[row, c]) // 32 for row in (2, 0) for c in range(prompt_len[row])},
        "output_bin_counts": {
            row * 40 + int(tokens[row, c]) for row in (2, 0) for c in range(prompt_len[row], prefill_len[row])
        },
    }
    loads = {"rows": {0, 1}, "all_token_ids": known, "prompt_len": {0, 2}, "prefill_len": {0, 2}} | touched
    return Case(args, loads)


def _count_sampled(batch: dict[str, Any], rng: Any) -> Case:
    """Row 1 uses no penalty, and the third token of row 2 was not accepted."""
    args = {
        "idx_mapping": np.array([2, 1, 0], np.int32),
        "sampled_tokens": np.array([[5, 9, 7], [3, 3, 3], [39, -1, 0]], np.int64),
        "num_sampled": np.array([2, 1, 2], np.int32),
        "repetition_penalty": np.array([1.5, 1, 1, 1], np.float32),
        "frequency_penalty": np.array([0, 0, 0.5, 0], np.float32),
        "presence_penalty": np.array([0, 0, 0, 0], np.float32),
        "output_bin_counts": _counts(rng)["output_bin_counts"],
    }
    loads: Cells = {name: {0, 1, 2} for name in ("idx_mapping", "num_sampled")}
    loads |= {f"{name}_penalty": {0, 1, 2} for name in ("repetition", "frequency", "presence")}
    loads |= {"sampled_tokens": {0, 1, 6, 7}, "output_bin_counts": {2 * 40 + 5, 2 * 40 + 9, 39}}
    return Case(args, loads)


def _output_tokens(batch: dict[str, Any], rng: Any) -> Case:
    """Logits rows 0 and 2: row 3 with two committed tokens, and row 1 with one and two drafts."""
    args = {
        "out": poisoned(8),
        "starts": np.array([0, 2, 5], np.int32),
        "rows": np.array([0, 2], np.int32),
        "expanded_idx_mapping": np.array([3, 1, 1], np.int32),
        "local_pos": np.array([0, 1, 2], np.int32),
        "logits_indices": np.array([4, 6, 7], np.int64),
        "input_ids": rng.integers(0, 40, 8).astype(np.int32),
        "all_token_ids": rng.integers(0, 40, (4, 12)).astype(np.int32),
        "prompt_len": np.array([3, 5, 7, 1], np.int32),
        "longest": 3,
    }
    loads = {name: {0, 2} for name in ("expanded_idx_mapping", "local_pos", "logits_indices")}
    loads |= {"rows": {0, 1}, "starts": {0, 1, 2}, "prompt_len": {1, 3}, "input_ids": {6, 7}}
    return Case(args, loads | {"all_token_ids": {3 * 12 + 1, 3 * 12 + 2, 12 + 5}})


def positions(**changes: Any) -> dict[str, Any]:
    """Two requests on rows 2 and 0: three tokens behind seven, one token behind five; room for six and for three."""
    return {
        "idx_mapping": np.array([2, 0], np.int32),
        "query_start_loc": np.array([0, 3, 4, 4], np.int32),
        "num_computed_tokens": np.array([5, 0, 7], np.int32),
        "positions": np.full(6, -7, np.int64),
        "seq_lens": np.full(3, -7, np.int32),
        "num_reqs": 2,
    } | changes


def stored(run: LensRun) -> dict[str, set[int]]:
    return touched(run, "store")


def touched(run: LensRun, kind: str) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for program in run.programs:
        for access in program.accesses:
            if access.kind == kind:
                found.setdefault(access.buffer, set()).update(access.index.tolist())
    return found


_HELPERS = {"_pick", "_batch_loads", "_tables", "_counts"}
INTEGER_OPS = sorted(
    name[1:]
    for name, value in list(globals().items())
    if name.startswith("_") and getattr(value, "__module__", "") == __name__ and name not in _HELPERS
)
