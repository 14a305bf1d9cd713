"""A graph for software streams: records laid on a tape once, replayed as one launch over the same buffers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from sys import getsizeof
from typing import TYPE_CHECKING

from mrv2lab.runtime.base import Graph, call_site
from mrv2lab.runtime.effects import Effects, GraphMemoryError
from mrv2lab.runtime.software import Record

if TYPE_CHECKING:
    from mrv2lab.runtime.cpu import CpuRuntime


class Tape(Graph):
    """See the module's docstring. Arguments are captured by reference, scalars by value, as in a CUDA graph."""

    def __init__(self, rt: CpuRuntime, name: str) -> None:
        self.rt = rt
        self.name = name
        self.effects = Effects()
        self.held = 0
        self.records: tuple[Record, ...] = ()
        self._laid: list[Record] = []
        self._limit: int | None = None
        rt.tapes.add(self)

    @contextmanager
    def capture(self) -> Iterator[None]:
        """See :meth:`Graph.capture`. A capture that breaks off leaves an empty graph."""
        with self.rt.taping(self):
            self.reset()
            limit = self.rt.graph_limit
            self._limit = None if limit is None else limit - sum(tape.held for tape in self.rt.tapes)
            try:
                yield
            except BaseException:
                self.reset()
                raise
        self.records, self._laid = tuple(self._laid), []

    def lay(self, record: Record) -> None:
        """Take one record, at the end. Raises :class:`GraphMemoryError` beyond the runtime's ``graph_limit``."""
        size = getsizeof(record) + getsizeof(record.args)
        if self._limit is not None and self.held + size > self._limit:
            raise GraphMemoryError(
                f"graph {self.name!r}: out of memory: {self.held + size:,} bytes of records, {self._limit:,} are left"
            )
        self.held += size
        self._laid.append(record)

    def reset(self) -> None:
        """See :meth:`Graph.reset`."""
        self.records = ()
        self._laid = []
        self.effects = Effects()
        self.held = 0

    def replay(self) -> None:
        """See :meth:`Graph.replay`."""
        if not self.records:
            raise RuntimeError(f"graph {self.name!r} is empty: capture it before the first replay")
        reads = tuple(address for record in self.records for address in record.reads)
        self.rt.launch(Record("replay", self.name, _play, (self.records,), self.effects.nbytes, call_site(), reads))
        if self.rt.observer.enabled:
            self.rt._mark_replay(self)


def _play(records: tuple[Record, ...]) -> None:
    for record in records:
        try:
            record.fn(*record.args)
        except Exception as error:
            error.add_note(f"in {record.kind} {record.name!r}, captured at {record.site}")
            raise
