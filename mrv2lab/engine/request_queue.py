"""The two orders in which requests wait. Counterpart in vLLM: ``v1/core/sched/request_queue.py``."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from typing import Literal, Protocol

from mrv2lab.engine.request import Request


def priority_key(request: Request) -> tuple[int, float, int]:
    """Smallest first in line, largest first to be preempted."""
    return (request.priority, request.arrival_time, request.arrival_order)


class RequestQueue(Protocol):
    """What the scheduler asks of a queue. ``pop`` and ``peek`` raise ``IndexError`` when it is empty."""

    def add(self, request: Request) -> None:
        """A request arrives."""

    def requeue(self, request: Request) -> None:
        """A request comes back: preempted, or passed over."""

    def peek(self) -> Request:
        """The next one."""
        ...

    def pop(self) -> Request:
        """Take the next one."""
        ...

    def remove(self, request: Request) -> None:
        """Take this one, wherever it stands. Raises ``ValueError`` if it is not here."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


class FCFSQueue:
    """First come, first served; who comes back goes to the front."""

    def __init__(self) -> None:
        self._queue: deque[Request] = deque()

    def add(self, request: Request) -> None:
        """See :class:`RequestQueue`."""
        self._queue.append(request)

    def requeue(self, request: Request) -> None:
        """See :class:`RequestQueue`."""
        self._queue.appendleft(request)

    def peek(self) -> Request:
        """See :class:`RequestQueue`."""
        return self._queue[0]

    def pop(self) -> Request:
        """See :class:`RequestQueue`."""
        return self._queue.popleft()

    def remove(self, request: Request) -> None:
        """See :class:`RequestQueue`."""
        self._queue.remove(request)

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue)


class PriorityQueue:
    """By :func:`priority_key`; where a request comes from does not matter."""

    def __init__(self) -> None:
        # arrival_order is unique, so two entries never compare their requests.
        self._heap: list[tuple[tuple[int, float, int], Request]] = []

    def add(self, request: Request) -> None:
        """See :class:`RequestQueue`."""
        heapq.heappush(self._heap, (priority_key(request), request))

    def requeue(self, request: Request) -> None:
        """See :class:`RequestQueue`."""
        self.add(request)

    def peek(self) -> Request:
        """See :class:`RequestQueue`."""
        return self._heap[0][1]

    def pop(self) -> Request:
        """See :class:`RequestQueue`."""
        return heapq.heappop(self._heap)[1]

    def remove(self, request: Request) -> None:
        """See :class:`RequestQueue`."""
        self._heap.remove((priority_key(request), request))
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, request in sorted(self._heap, key=lambda entry: entry[0]))


def make_queue(policy: Literal["fcfs", "priority"]) -> RequestQueue:
    """The queue of a scheduling policy."""
    return PriorityQueue() if policy == "priority" else FCFSQueue()
