"""What a step explorer can be shown: something with steps, and a view of each."""

from __future__ import annotations

from typing import Protocol

from mrv2lab.recording.view import StepView


class StepSource(Protocol):
    """A recording, or a live engine that makes further steps."""

    title: str
    live: bool
    """Whether :meth:`advance` can be called."""

    def __len__(self) -> int:
        """Steps there are now."""
        ...

    def view(self, index: int) -> StepView:
        """The step at ``index``. Raises ``IndexError`` outside 0..len-1."""
        ...

    def advance(self, unit: str) -> str | None:
        """Live only: run on by one ``"step"`` or one ``"phase"``; a sentence if it could not (nothing to do, an error
        in the engine and how to reset it), else None."""
        ...

    def close(self) -> None:
        """Give back what the source holds (a recorder attached to an engine)."""
        ...
