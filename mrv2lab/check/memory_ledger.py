"""Where the bytes are: every table with its formula, its place, and what was asked for against what it should be.

:func:`predict` needs a config and allocates nothing. :func:`measure` takes an engine as it stands before its first
request and sets the runtime's own register of buffers (their names, places and bytes) against the formulas.
"""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from mrv2lab.check.memory_formulas import evaluate, words
from mrv2lab.check.memory_tables import lines_of
from mrv2lab.config import EngineConfig
from mrv2lab.engine.engine import Engine
from mrv2lab.runner_v1 import ModelRunnerV1

PLACES = ("device", "uva", "pinned", "host")
STATE = ("state/", "sample/", "runner/", "runner_v1/")
"""Owners of tables that are a runner's and not the model's."""
COLUMNS = ["table", "formula", "place", "requested", "rounded", "expected", "owner"]
_TEMPORARY = re.compile(r"(\.tmp|^result of )")
_OUTSIDE = re.compile(r"^(warm_up|profile|no|recorder)\.")
"""Of a warm-up, a memory profile or somebody who looks: none of the engine's tables."""


def rounded_bytes(nbytes: int, place: str) -> int:
    """What PyTorch's allocators take on a GPU machine: device memory in units of 512 bytes, page-locked memory in
    powers of two, pageable memory as it is. (A device tensor over 1 MiB may be given up to 1 MiB more, where the rest
    of its page is too small to be split off.)"""
    if place == "device":
        return -(-nbytes // 512) * 512
    if place in ("uva", "pinned") and nbytes:
        return 1 << (nbytes - 1).bit_length()
    return nbytes


@dataclass(frozen=True)
class Ledger:
    """``rows``: a table of :data:`COLUMNS`, bytes; ``requested`` is missing where nothing was allocated, ``expected``
    where there is no formula, or one that depends on what batches want. Besides, ``when`` says what a table comes with
    that does not come with the engine, and ``needed`` whether its absence is a problem. ``words``: the values of R, L,
    V, ..."""

    rows: pd.DataFrame
    words: Mapping[str, int]

    @property
    def problems(self) -> list[str]:
        """Tables whose bytes are not the formula's, tables without a formula, formulas without a table."""
        found = []
        for row in self.rows.itertuples():
            there, known = not pd.isna(row.requested), not pd.isna(row.expected)
            if there and known and row.requested != row.expected:
                found.append(
                    f"{row.table}: {int(row.requested):,} bytes in {row.place}, but {row.formula} is "
                    f"{int(row.expected):,}"
                )
            elif there and not known and row.owner == "?":
                found.append(f"{row.table}: {int(row.requested):,} bytes in {row.place} that no formula explains")
            elif not there and known and row.needed:
                found.append(f"{row.table}: {row.formula} in {row.place}, but there is no such buffer")
        return found

    @property
    def left_out(self) -> pd.DataFrame:
        """Rows that no sum counts: tables that come once something needs them, and, where nothing was allocated, those
        whose size their op decides."""
        return self.rows[self.rows.requested.isna() & ~self.rows.needed]

    def state(self) -> Ledger:
        """The runner's tables alone, without weights, KV cache and the decoder's buffers."""
        return Ledger(self.rows[self.rows.owner.str.startswith(STATE)], self.words)

    def by_place(self) -> pd.DataFrame:
        """Bytes by place and altogether: requested (else expected), and rounded."""
        rows = self.rows.drop(self.left_out.index)
        sums = rows.assign(requested=rows.requested.fillna(rows.expected)).groupby("place")[["requested", "rounded"]]
        return sums.sum().reindex(list(PLACES), fill_value=0).astype("int64")

    def by_owner(self) -> pd.DataFrame:
        """The same by module."""
        rows = self.rows.drop(self.left_out.index)
        sums = rows.assign(requested=rows.requested.fillna(rows.expected)).groupby(["owner", "place"])[["requested"]]
        return sums.sum().astype("int64").unstack(fill_value=0).droplevel(0, axis=1)


def predict(config: EngineConfig) -> Ledger:
    """The ledger of an engine that nobody has built. ``num_blocks`` None counts as no block: it is measured. Its sums
    are those of :func:`measure` less the tables that have no formula."""
    values = words(config)
    return _ledger([_row(line, None, values) for line in lines_of(config)], values)


def measure(engine: Engine) -> Ledger:
    """The ledger of an engine before its first request, warmed up or not: the bytes of its actual buffers beside the
    formulas. Only tables that are there are checked, of those that come with a request.

    Behind a burst of requests, what carries staged diffs, and the tokens of custom processors, may have outgrown the
    size that they are meant for, which is then a problem."""
    config, runner = engine.worker.config, engine.worker.runner
    if isinstance(runner, ModelRunnerV1):  # whose tables follow what the attention backend left of the mode
        graphs = dataclasses.replace(config.graphs, cudagraph_mode=runner.graphs.dispatcher.mode)
        config = dataclasses.replace(config, graphs=graphs)
    values = words(config)
    there: dict[tuple[str, str], int] = {}
    for buffer in engine.rt.registry.buffers():
        if not _TEMPORARY.search(buffer.name) and not _OUTSIDE.match(buffer.name):
            key = buffer.name, buffer.place.value
            there[key] = there.get(key, 0) + buffer.nbytes
    rows = []
    for line in lines_of(config):
        if line.place == "host" and (line.name, "host") not in there:
            array = _at(runner, line.name)
            if array is not None:
                there[line.name, "host"] = array.nbytes
        own = {**values, "m": _count(_at(runner, line.grows))} if line.grows else values
        rows.append(_row(line, there.pop((line.name, line.place), None), own))
    for (name, place), nbytes in there.items():
        rows.append({"table": name, "formula": "", "place": place, "requested": nbytes, "expected": None,
                     "owner": "?", "needed": False, "when": ""})  # fmt: skip
    return _ledger(rows, values)


def growth(config: EngineConfig, field: str, values: Sequence[int]) -> pd.DataFrame:
    """Expected bytes of the runner's own tables by place (columns), one row for each value of a field of
    :class:`SchedulerConfig` (``max_num_reqs`` is R, ``max_model_len`` L, ``max_num_batched_tokens`` T).

    Raises ``ValueError`` for a field that has no part in it."""
    if field not in ("max_num_reqs", "max_model_len", "max_num_batched_tokens"):
        raise ValueError(f"{field!r} does not size a table; use max_num_reqs, max_model_len or max_num_batched_tokens")
    made = {}
    for value in values:
        one: Any = {field: int(value)}
        scheduler = dataclasses.replace(config.scheduler, **one)
        made[value] = predict(dataclasses.replace(config, scheduler=scheduler)).state().by_place()["requested"]
    return pd.DataFrame(made).T.rename_axis(field).rename_axis(columns=None)


def _row(line: Any, requested: int | None, values: Mapping[str, int]) -> dict[str, Any]:
    unknown = not line.formula or (line.grows and line.lazy and requested is None)
    expected = None if unknown else evaluate(line.formula, values)
    needed = not line.lazy and expected is not None
    return {"table": line.name, "formula": line.formula, "place": line.place, "requested": requested,
            "expected": expected, "owner": line.owner, "needed": needed, "when": line.lazy}  # fmt: skip


def _ledger(rows: list[dict[str, Any]], values: Mapping[str, int]) -> Ledger:
    frame = pd.DataFrame(rows).astype({"requested": "Int64", "expected": "Int64", "needed": bool})
    taken = frame.requested.fillna(frame.expected).fillna(0)
    frame["rounded"] = [rounded_bytes(int(n), place) for n, place in zip(taken, frame.place, strict=True)]
    return Ledger(frame[[*COLUMNS, "when", "needed"]], values)


def _at(runner: Any, path: str) -> Any:
    """What is at an attribute's path, numbers being places in a tuple or list; None if there is nothing."""
    found = runner
    for part in path.split("."):
        try:
            found = found[int(part)] if part.isdigit() else operator.attrgetter(part)(found)
        except (AttributeError, IndexError):
            return None
    return found


def _count(found: Any) -> int:
    """The number ``found``, or the length of it."""
    return found if isinstance(found, int) else len(found)
