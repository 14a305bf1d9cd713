"""What every table of both runners takes, as a formula in text that is also evaluated: ``R x L int32``.

Written from what the tables are for, not read off the tensors, so that a ledger built on it can disagree with them.
:data:`MEANINGS` has the words.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mrv2lab.config import EngineConfig

MEANINGS = {
    "R": "requests at most, max_num_reqs",
    "L": "tokens of a request at most, max_model_len",
    "T": "tokens of a step at most, max_num_batched_tokens",
    "V": "vocab_size of the model",
    "K": "drafts of a request in a step, num_speculative_tokens",
    "B": "tokens of a KV block, block_size",
    "blocks": "of the KV pool, num_blocks",
    "n": "rows of logits of a step at most, min(R * (K + 1), T)",
    "G": "groups of layers whose attention reaches equally far",
    "P": "slots of a table in a UVA pool, pool_depth",
    "S": "steps in flight at most: 2, or 1 without async_scheduling",
    "H": "hidden_size of the model",
    "I": "intermediate_size of the model",
    "Hq": "num_attention_heads of the model",
    "Hk": "num_key_value_heads of the model",
    "D": "head_dim of the model",
    "layers": "num_hidden_layers of the model",
    "positions": "max_position_embeddings of the model",
    "m": "most that a batch has wanted of the table so far, 0 at first: it grows",
}
"""The words of the formulas; S is in no formula, but says how often a table is there, as P mostly does. m is read off
the table's owner, another one each time."""
WIDTHS = {"int32": 4, "int64": 8, "uint64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "bool": 1}
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_FUNCTIONS: dict[str, Callable[..., int]] = {
    "ceil": math.ceil,
    "min": min,
    "max": max,
    "pow2": lambda n: 1 << max(int(n) - 1, 0).bit_length(),
}


@dataclass(frozen=True)
class Line:
    """One table: its name in the runtime's registry, or an attribute's path for a NumPy array of the host.

    ``formula`` "" = a scratch whose size its op chooses; such a line says only what was asked for.
    """

    name: str
    formula: str
    place: str
    owner: str
    lazy: str = ""
    """What the table comes with, if not with the engine: a request that needs it, be it the warm-up's or a memory
    profile's, a step, a dummy run, a kind of kernels."""
    grows: str = ""
    """The path in the runner to the value of m: a number, or something of that length."""


def words(config: EngineConfig) -> dict[str, int]:
    """The value of every word of the formulas."""
    model, scheduler, spec = config.model, config.scheduler, config.spec
    rows, tokens, drafts = scheduler.max_num_reqs, scheduler.max_num_batched_tokens, spec.num_speculative_tokens
    return {
        "R": rows,
        "L": scheduler.max_model_len,
        "T": tokens,
        "V": model.vocab_size,
        "K": drafts,
        "B": config.cache.block_size,
        "blocks": config.cache.num_blocks or 0,
        "n": min(rows * (drafts + 1), tokens),
        "G": len(model.kv_groups),
        "P": config.runner.pool_depth,
        "S": scheduler.max_concurrent_steps,
        "H": model.hidden_size,
        "I": model.intermediate_size,
        "Hq": model.num_attention_heads,
        "Hk": model.num_key_value_heads,
        "D": model.head_dim,
        "layers": model.num_hidden_layers,
        "positions": model.max_position_embeddings,
        "m": 0,
    }


def evaluate(formula: str, values: Mapping[str, int]) -> int:
    """Bytes of ``a x b x ... dtype``. Raises ``ValueError`` for a formula that says anything else."""
    shape, _, dtype = formula.rpartition(" ")
    if dtype not in WIDTHS:
        raise ValueError(f"formula {formula!r} ends in no dtype; known: {', '.join(WIDTHS)}")
    sides = [_number(ast.parse(side, mode="eval").body, values, formula) for side in shape.split(" x ")]
    return int(math.prod(sides) * WIDTHS[dtype])


def late(lazy: str, lines: Iterable[Line]) -> Iterator[Line]:
    """``lines`` that come with ``lazy``, as :class:`Line` has it."""
    return (replace(line, lazy=lazy) for line in lines)


def growing(grows: str, lines: Iterable[Line]) -> Iterator[Line]:
    """``lines`` whose m is at the path ``grows``, as :class:`Line` has it."""
    return (replace(line, grows=grows) for line in lines)


def _number(node: ast.expr, values: Mapping[str, int], formula: str) -> Any:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id=name) if name in values:
            return values[name]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_number(left, values, formula), _number(right, values, formula))
        case ast.Call(func=ast.Name(id=name), args=given) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*(_number(one, values, formula) for one in given))
    raise ValueError(f"formula {formula!r}: {ast.unparse(node)} is no number and no word of the ledger")


class Writer:
    """Makes the lines of one owner under one transfer policy, whose ways of reaching the device they name."""

    def __init__(self, owner: str, policy: str, config: EngineConfig) -> None:
        self.owner, self.policy = owner, policy
        self._depth = config.runner.pool_depth
        self._words = words(config)

    def plain(self, name: str, formula: str, place: str = "device") -> Line:
        """A tensor as it stands."""
        return Line(name, formula, place, self.owner)

    def devices(self, formulas: Mapping[str, str], prefix: str = "") -> Iterator[Line]:
        """Several tensors of the device."""
        return (self.plain(prefix + name, formula) for name, formula in formulas.items())

    def upload(self, name: str, formula: str, policy: str = "") -> Iterator[Line]:
        """An array that every step sends: into a fixed place on the device."""
        yield self.plain(name, formula)
        if (policy or self.policy) in ("unsafe", "barrier"):
            yield self.plain(f"{name}.pinned", formula, "pinned")

    def staging(self, name: str, formula: str) -> Iterator[Line]:
        """An array of diffs: a pool of UVA slots, or an upload."""
        if self.policy == "uva_pool":
            return self._slots(name, formula)
        return self.upload(name, formula)

    def table(self, name: str, formula: str) -> Iterator[Line]:
        """A table whose truth is the host's: snapshots in UVA slots, or a copy on the device."""
        if self.policy == "uva_pool":
            yield from self._slots(name, formula)
        else:
            yield self.plain(name, formula)
            yield self.plain(f"{name}.host", formula, "host" if self.policy == "pinned_copy" else "pinned")

    def staged(self, name: str, formula: str, place: str = "device", writes: int = 64) -> Iterator[Line]:
        """A table that packed diffs change, and what carries them."""
        yield self.plain(name, formula, place)
        yield from self.diffs(name, str(writes), formula.rpartition(" ")[2])

    def diffs(self, name: str, writes: str, dtype: str, others: Sequence[str] | None = None) -> Iterator[Line]:
        """Row, start, where the values begin and (of several tables) the table of every diff, and room for 16 values
        each of every table; every part of the heads ends at a multiple of 16 bytes. Beside them there is room for 64
        diffs, for 512, and so on, with room for 4,096 values. ``others``: the values of a row of each table but the one
        with the longest."""
        parts = {"diffs": (writes, "0")}
        few, most = 64, evaluate(f"{writes} int32", self._words) // 4
        while few < most:
            parts[f"diffs.{few}"] = str(few), "4096"
            few *= 8
        more, arrays = (0, 3) if others is None else (len(others) + 1, 4)
        for part, (count, least) in parts.items():
            heads = f"{arrays} * 4 * ceil(({count} + {1 + more}) / 4)"
            rooms = [f"max(min({n}, 16) * {count}, min({n}, {least}))" for n in others or ()]
            rooms.append(f"max(16 * {count}, {least})")
            yield from self.staging(f"{name}.{part}", f"({heads} + {WIDTHS[dtype] // 4} * ({' + '.join(rooms)})) int32")

    def returned(self, name: str, formula: str) -> Iterator[Line]:
        """Something a step brings back: the device's and its pinned copy."""
        yield self.plain(name, formula)
        yield self.plain(f"{name}.host", formula, "pinned")

    def _slots(self, name: str, formula: str) -> Iterator[Line]:
        return (self.plain(f"{name}.uva{i}", formula, "uva") for i in range(self._depth))
