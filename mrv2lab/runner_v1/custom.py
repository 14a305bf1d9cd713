"""Custom processors: a request's own functions on its logits row, one call each in a Python loop.

Counterpart in vLLM: ``AdapterLogitsProcessor`` in ``v1/sample/logits_processor/__init__.py``. There an exception ends
the engine; here it ends its request.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch

from mrv2lab.protocol import LogitsFunction
from mrv2lab.runtime.base import Runtime

Keyed = tuple[tuple[int, LogitsFunction], ...]
"""Functions with the numbers by which queued work finds them: only tensors and scalars can be queued."""


class CustomProcessors:
    """Every live request's functions, and what went wrong with them."""

    def __init__(self, rt: Runtime) -> None:
        self.rt = rt
        self._functions: dict[int, LogitsFunction] = {}
        self._failed: set[int] = set()
        """First function of each request that failed: not called again."""
        self._numbers = itertools.count()
        self._launches = itertools.count()
        self._errors: dict[int, dict[int, str]] = {}
        """Launch -> row -> reason; written by queued work, maybe in another thread, read behind a wait."""
        rt.register("v1.sample.custom", self._apply)
        rt.register("v1.sample.forget_custom", self._forget)

    def add(self, functions: Sequence[LogitsFunction]) -> Keyed:
        """Take the functions of a new request."""
        keyed = tuple(zip(self._numbers, functions, strict=False))
        self._functions.update(keyed)
        return keyed

    def forget(self, keyed: Keyed) -> None:
        """Their request is over; calls that are queued still find them."""
        if keyed:
            self.rt.run("v1.sample.forget_custom", tuple(number for number, _ in keyed))

    def launch(
        self,
        logits: torch.Tensor,
        processors: Mapping[int, Keyed],
        outputs: Sequence[list[int] | None],
        output_token_ids: torch.Tensor,
        discarded: Sequence[int],
    ) -> int | None:
        """Queue the calls for the rows of ``logits`` float32[r, V] that have processors, but those whose token nobody
        gets; returns what :meth:`take_errors` wants, or None if there is no such row.

        ``outputs`` are the rows' lists of ids, ``output_token_ids`` int64[r, longest] the same on the device.
        """
        rows = sorted(processors.keys() - set(discarded))
        if not rows:
            return None
        launch = next(self._launches)
        self._errors[launch] = {}
        self.rt.run(
            "v1.sample.custom",
            logits,
            output_token_ids,
            launch,
            tuple(rows),
            tuple(tuple(number for number, _ in processors[row]) for row in rows),
            tuple(len(outputs[row] or ()) for row in rows),
            reads=(logits, output_token_ids),
            writes=(logits,),
        )
        return launch

    def _apply(
        self,
        logits: torch.Tensor,
        output_token_ids: torch.Tensor,
        launch: int,
        rows: tuple[int, ...],
        numbers: tuple[tuple[int, ...], ...],
        lengths: tuple[int, ...],
    ) -> None:
        """Queued work. A row of which a function fails keeps its logits, and its functions are not called again."""
        for row, mine, length in zip(rows, numbers, lengths, strict=True):
            if mine[0] in self._failed:
                continue
            values, ids = logits[row].clone(), output_token_ids[row, :length].int()
            for number in mine:
                function = self._functions[number]
                try:
                    values = _checked(function(ids, values), logits[row])
                except Exception as error:
                    self._failed.add(mine[0])
                    self._errors.setdefault(launch, {})[row] = _reason(function, error)
                    break
            else:
                # A NaN counts as -inf, here as everywhere.
                torch.nan_to_num(values, nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"), out=logits[row])

    def _forget(self, numbers: tuple[int, ...]) -> None:
        """Queued work."""
        for number in numbers:
            del self._functions[number]
        self._failed.difference_update(numbers)

    def take_errors(self, launch: int) -> dict[int, str]:
        """Row -> reason, once, after the launch was waited for."""
        return self._errors.pop(launch, {})

    def reset(self) -> None:
        """Forget every request. The queue must be empty."""
        self._functions.clear()
        self._failed.clear()
        self._errors.clear()


def _checked(made: object, row: torch.Tensor) -> torch.Tensor:
    """``made``, if it can stand in place of ``row`` float32[V]; raises ``TypeError`` saying what it is instead."""
    if not isinstance(made, torch.Tensor):
        raise TypeError(f"it returned {type(made).__name__}, not a tensor float32[{len(row)}]")
    if made.dtype != torch.float32 or made.shape != row.shape or made.device != row.device:
        raise TypeError(
            f"it returned {made.dtype}{list(made.shape)} on {made.device}, not torch.float32{list(row.shape)} on "
            f"{row.device}"
        )
    return made


def _reason(function: LogitsFunction, error: Exception) -> str:
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"custom processor {name} failed: {type(error).__name__}{f': {error}' if str(error) else ''}"
