"""What the lesson on dummy runs and memory looks at: hashes of everything that is state, the launches of a step, what a
batch's input buffers hold, and how Triton sorts the integers that kernels are compiled for."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pandas as pd
import torch

from mrv2lab.engine.engine import Engine
from mrv2lab.runner import ModelRunner, dummy
from mrv2lab.runtime.base import Tensors
from mrv2lab.runtime.tap import Pass, Tap, tapped

STEP_INPUTS = (
    "input_ids",
    "positions",
    "seq_lens",
    "idx_mapping",
    "query_start_loc",
    "logits_indices",
    "slot_mappings",
    "input_block_table",
)
"""What every step fills anew and reads nothing of from the step before: no state. Prefixes of names."""


def state_hash(engine: Engine) -> pd.Series:
    """Twelve hex digits of every table that outlives a step, by name: rows, block tables, the sampler's state, the KV
    cache, and the host's own tables. Waits for the device: for looking."""
    engine.rt.synchronize()
    raw, runner = engine.rt.raw, engine.worker.runner
    if isinstance(runner, ModelRunner):
        device = {name: table for name, table in runner.tables().items() if not name.startswith(STEP_INPUTS)}
        host = runner.host_tables() | {"num_computed_tokens_np": runner.req_states.num_computed_tokens_np}
        rows = runner.req_states.free_indices, runner.req_states.req_id_to_index
    else:
        batch = runner.input_batch
        device = {}
        host = {name: getattr(batch, name) for name in ("token_ids_cpu", "num_tokens_no_spec", "num_prompt_tokens")}
        host |= {"num_computed_tokens": batch.num_computed_tokens.np} | batch.block_table.host_tables()
        rows = batch.req_ids, batch.req_id_to_index
    for layer, pair in enumerate(engine.worker.kv_caches):
        device |= {f"{kind}_cache.{layer}": cache for kind, cache in zip(("key", "value"), pair, strict=True)}
    found = {name: _digest(raw(table).cpu().contiguous().view(torch.uint8).numpy()) for name, table in device.items()}
    found |= {f"host: {name}": _digest(np.ascontiguousarray(table)) for name, table in host.items()}
    return pd.Series(found | {"host: who is in which row": _digest(np.frombuffer(repr(rows).encode(), np.uint8))})


def _digest(array: np.ndarray[Any, Any]) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()[:12]


def changed(before: pd.Series, after: pd.Series) -> list[str]:
    """Names of the tables whose hashes differ."""
    return [str(name) for name in before.index if before[name] != after[name]]


class _Names(Tap):
    def __init__(self) -> None:
        self.names: list[str] = []

    def launched(self, what: Pass, reads: Tensors, writes: Tensors) -> None:
        """See :class:`Tap`."""
        self.names.append(f"{what.kind} {what.name}" if what.kind in ("h2d", "d2h") else what.name)


def launches(engine: Engine, act: Callable[[], object]) -> Counter[str]:
    """How often each kernel, segment or copy was queued while ``act()`` ran; replays are not looked into."""
    tap = _Names()
    with tapped(engine.rt, tap):
        act()
    return Counter(tap.names)


def launch_table(**runs: Counter[str]) -> pd.DataFrame:
    """The launches of several runs side by side, in the order of their first occurrence, but for the decoder's: of
    these the sum alone."""
    columns = {}
    for name, counts in runs.items():
        decoder = sum(n for launch, n in counts.items() if _is_decoders(launch))
        columns[name] = {launch: n for launch, n in counts.items() if not _is_decoders(launch)}
        columns[name]["(the decoder's segments)"] = decoder
    order = list(dict.fromkeys(launch for column in columns.values() for launch in column))
    order.sort(key=lambda launch: launch.startswith("("))
    return pd.DataFrame(columns).reindex(order).fillna(0).astype(int)


def _is_decoders(launch: str) -> bool:
    return launch.startswith(("layer.", "embed", "final_norm"))


def batch_inputs(engine: Engine, num_reqs: int, num_tokens: int) -> dict[str, str]:
    """What the MRV2 runner's input buffers hold now of a batch of so many requests and tokens. Waits for the device."""
    runner = engine.worker.runner
    tables, slots = runner.block_tables.input_tables[0], runner.block_tables.slot_mappings

    def some(tensor: torch.Tensor, most: int = 12) -> str:
        values = engine.rt.read(tensor).reshape(-1).tolist()
        return " ".join(map(str, values[:most])) + (" ..." if len(values) > most else "")

    return {
        "rows (idx_mapping)": some(runner.buffers.idx_mapping.device[:num_reqs]),
        "query_start_loc": some(runner.buffers.query_start_loc.device[: num_reqs + 1]),
        "positions": some(runner.buffers.positions[:num_tokens]),
        "seq_lens": some(runner.buffers.seq_lens[:num_reqs]),
        "slots (where KV is written)": some(slots[0, :num_tokens]),
        "block table of the first request": some(tables[0], 8),
    }


@contextmanager
def somebodys_row(row: int) -> Iterator[None]:
    """The bug, to be attached by a ``with``: the requests of a dummy run are in ``row``, which may be somebody's,
    instead of in no row."""
    before = dummy.NOBODY
    dummy.NOBODY = row
    try:
        yield
    finally:
        dummy.NOBODY = before


def integer_class(value: int) -> str:
    """How Triton tells an integer argument from others when it compiles: a kernel is compiled once for each class."""
    if value == 1:
        return "1"
    return "a multiple of 16" if value % 16 == 0 else "any other"


def kernels_to_compile(counts: Sequence[int]) -> pd.DataFrame:
    """A row a class of integers: which of ``counts`` are in it."""
    classes: dict[str, list[int]] = {"1": [], "a multiple of 16": [], "any other": []}
    for count in counts:
        classes[integer_class(count)].append(count)
    return pd.DataFrame({"counts": pd.Series({name: _ranges(found) for name, found in classes.items()})})


def _ranges(found: Sequence[int], most: int = 8) -> str:
    return ", ".join(map(str, found[:most])) + (f", ... ({len(found)} in all)" if len(found) > most else "")


@contextmanager
def compilations(engine: Engine) -> Iterator[list[str]]:
    """The kernels that Triton compiles inside the ``with``; always none where no kernel is compiled (specs)."""
    compiled: list[str] = []
    if engine.rt.backend != "triton":
        yield compiled
        return
    import triton

    def note(*args: Any, **options: Any) -> None:
        compiled.append(str(options.get("repr") or options.get("fn")))

    with triton.knobs.runtime.scope():
        triton.knobs.runtime.jit_post_compile_hook = note
        yield compiled
