"""A graph for software streams: records laid on a tape once, replayed as one launch over the same buffers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mrv2lab.observer import Mark
from mrv2lab.runtime.base import Graph, call_site
from mrv2lab.runtime.software import Record

if TYPE_CHECKING:
    from mrv2lab.runtime.cpu import CpuRuntime


class Tape(Graph):
    """See the module's docstring. Arguments are captured by reference, scalars by value, as in a CUDA graph."""

    def __init__(self, rt: CpuRuntime, name: str) -> None:
        self.rt = rt
        self.name = name
        self.records: tuple[Record, ...] = ()
        self._laid: list[Record] = []

    @contextmanager
    def capture(self) -> Iterator[None]:
        """See :meth:`Graph.capture`. A capture that breaks off leaves an empty graph."""
        with self.rt.taping(self):
            self.records = ()
            self._laid = []
            yield
        self.records = tuple(self._laid)

    def lay(self, record: Record) -> None:
        """Take one record, at the end."""
        self._laid.append(record)

    def replay(self) -> None:
        """See :meth:`Graph.replay`."""
        if not self.records:
            raise RuntimeError(f"graph {self.name!r} is empty: capture it before the first replay")
        nbytes = sum(record.nbytes for record in self.records)
        reads = tuple(address for record in self.records for address in record.reads)
        self.rt.launch(Record("replay", self.name, _play, (self.records,), nbytes, call_site(), reads))
        if self.rt.observer.enabled:
            self.rt.observer.mark(Mark("replay", self.name, self.rt.current.name, nbytes, site=self.rt.site()))


def _play(records: tuple[Record, ...]) -> None:
    for record in records:
        try:
            record.fn(*record.args)
        except Exception as error:
            error.add_note(f"in {record.kind} {record.name!r}, captured at {record.site}")
            raise
