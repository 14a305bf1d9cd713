"""A graph for software streams: records laid on a tape once, replayed as one launch over the same buffers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mrv2lab.observer import Mark
from mrv2lab.runtime.base import Graph
from mrv2lab.runtime.software import Record

if TYPE_CHECKING:
    from mrv2lab.runtime.cpu import CpuRuntime


class Tape(Graph):
    """See the module's docstring. Arguments are captured by reference, scalars by value, as in a CUDA graph."""

    def __init__(self, rt: CpuRuntime, name: str) -> None:
        self.rt = rt
        self.name = name
        self.records: list[Record] = []

    @contextmanager
    def capture(self) -> Iterator[None]:
        """See :meth:`Graph.capture`."""
        self.records.clear()
        with self.rt.taping(self):
            yield

    def replay(self) -> None:
        """See :meth:`Graph.replay`."""
        if not self.records:
            raise RuntimeError(f"graph {self.name!r} is empty: capture it before the first replay")
        nbytes = sum(record.nbytes for record in self.records)
        self.rt.launch(Record("replay", self.name, _play, (tuple(self.records),), nbytes, self.records[0].site))
        if self.rt.observer.enabled:
            self.rt.observer.mark(Mark("replay", self.name, self.rt.current.name, nbytes, site=self.rt.site()))


def _play(records: tuple[Record, ...]) -> None:
    for record in records:
        record.fn(*record.args)
