"""A deliberate bug as a value: attached by a ``with``, detached always."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

Check = Literal["twin", "recording", "invariants", "race", "sampler"]
"""Two runners on one schedule; a recording's checksums; a runner's state; host writes under the device's reads; the
sampler alone, on random logits, against plain float64 NumPy."""


class Patch:
    """Attributes replaced for a while. What a mutant's function gets."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace ``owner.name``, which must be the owner's own, not inherited: only that can be put back."""
        if name not in vars(owner):
            raise AttributeError(f"{owner!r} has no {name!r} of its own; patch the class that defines it")
        self._undo.append((owner, name, inspect.getattr_static(owner, name)))
        setattr(owner, name, value)

    def around(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        """Replace a function; ``replacement`` gets the original first, then the call's arguments."""
        original = getattr(owner, name)

        def mutated(*args: Any, **kwargs: Any) -> Any:
            return replacement(original, *args, **kwargs)

        self.set(owner, name, mutated)

    def undo(self) -> None:
        """Put everything back, the latest first."""
        while self._undo:
            owner, name, value = self._undo.pop()
            setattr(owner, name, value)


@dataclass(frozen=True)
class Mutant:
    """One bug. Calling it makes a ``with`` block in which it is there, for every runner of the process::

        with mutants.pool_depth_1():
            ...

    A runner must be made inside, since some bugs lie in constructors. On a CPU with specs the bug is in the device's
    work too; a compiled kernel is not changed, so mutants are for software streams.
    """

    name: str
    breaks: str
    """One sentence: what goes wrong."""
    runner: Literal["mrv2", "v1"]
    caught_by: tuple[Check, ...]
    """Which checks find it."""
    patch: Callable[[Patch], None]
    needs: Mapping[str, Any] = field(default_factory=dict)
    """Options of ``Engine`` without which nothing shows."""

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """The bug is there inside the ``with``."""
        patch = Patch()
        try:
            self.patch(patch)
            yield
        finally:
            patch.undo()


def mutant(
    runner: Literal["mrv2", "v1"], *caught_by: Check, breaks: str, **needs: Any
) -> Callable[[Callable[[Patch], None]], Mutant]:
    """Make a :class:`Mutant` of a function that applies it; its name is the function's."""

    def make(patch: Callable[[Patch], None]) -> Mutant:
        return Mutant(patch.__name__, breaks, runner, caught_by, patch, needs)

    return make
