"""What every table of both runners takes, as a formula in text that is also evaluated: ``R x L int32``.

Written from what the tables are for, not read off the tensors, so that a ledger built on it can disagree with them.
The words: R requests, L tokens of a request (max_model_len), T tokens of a step, V vocabulary, K drafts, B tokens of a
block, blocks of the KV pool, n rows of logits (min(R * (K + 1), T)), G groups of layers with one reach, P slots of a
UVA pool, S steps in flight; of the model H, I, Hq, Hk, D, layers, and positions.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mrv2lab.config import EngineConfig

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
    "pow2": lambda n: 1 << max(int(n) - 1, 0).bit_length(),
}


@dataclass(frozen=True)
class Line:
    """One table: its name in the runtime's registry, or an attribute's path for a NumPy array of the host.

    ``formula`` "" = a scratch whose size its op chooses; such a line says only what was asked for. ``lazy`` tables come
    with the first request that needs them.
    """

    name: str
    formula: str
    place: str
    owner: str
    lazy: bool = False


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
    }


def evaluate(formula: str, values: Mapping[str, int]) -> int:
    """Bytes of ``a x b x ... dtype``. Raises ``ValueError`` for a formula that says anything else."""
    shape, _, dtype = formula.rpartition(" ")
    if dtype not in WIDTHS:
        raise ValueError(f"formula {formula!r} ends in no dtype; known: {', '.join(WIDTHS)}")
    sides = [_number(ast.parse(side, mode="eval").body, values, formula) for side in shape.split(" x ")]
    return int(math.prod(sides) * WIDTHS[dtype])


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

    def plain(self, name: str, formula: str, place: str = "device", lazy: bool = False) -> Line:
        """A tensor as it stands."""
        return Line(name, formula, place, self.owner, lazy)

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

    def diffs(self, name: str, writes: str, dtype: str, grouped: bool = False) -> Iterator[Line]:
        """Row, start, where the values begin and (``grouped``) the table of every diff, and room for 16 values each."""
        for part in ("rows", "starts", "groups")[: 3 if grouped else 2]:
            yield from self.staging(f"{name}.{part}", f"{writes} int32")
        yield from self.staging(f"{name}.cu_lens", f"({writes} + 1) int32")
        yield from self.staging(f"{name}.contents", f"16 x {writes} {dtype}")

    def returned(self, name: str, formula: str, lazy: bool = False) -> Iterator[Line]:
        """Something a step brings back: the device's and its pinned copy."""
        yield self.plain(name, formula, "device", lazy)
        yield self.plain(f"{name}.host", formula, "pinned", lazy)

    def _slots(self, name: str, formula: str) -> Iterator[Line]:
        return (self.plain(f"{name}.uva{i}", formula, "uva") for i in range(self._depth))
