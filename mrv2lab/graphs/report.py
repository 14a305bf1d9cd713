"""What the graphs cost, as a value that reads well in a notebook."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from mrv2lab.graphs.descriptor import BatchDescriptor, count


@dataclass(frozen=True, slots=True)
class Captured:
    """What one shape cost."""

    descriptor: BatchDescriptor
    graphs: int
    """1 for a full graph, the number of pieces otherwise."""
    launches: int
    """Launches of the runtime that the graphs hold."""
    nbytes: int
    """Memory that the capture took: the device's free memory before less after; on a CPU the tapes' own records."""
    seconds: float


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """Every shape's cost in the order of capture, and what has no graph after all."""

    captured: tuple[Captured, ...] = ()
    dropped: dict[BatchDescriptor, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Memory of all graphs, in bytes."""
        return sum(one.nbytes for one in self.captured)

    @property
    def seconds(self) -> float:
        """Time of all captures, their warm-up runs included."""
        return sum(one.seconds for one in self.captured)

    def rows(self) -> list[dict[str, object]]:
        """One a shape: graph, mode, tokens, requests, graphs, launches, nbytes, seconds."""
        return [
            {
                "graph": str(one.descriptor),
                "mode": one.descriptor.mode,
                "tokens": one.descriptor.num_tokens,
                "requests": one.descriptor.num_reqs,
                "graphs": one.graphs,
                "launches": one.launches,
                "nbytes": one.nbytes,
                "seconds": one.seconds,
            }
            for one in self.captured
        ]

    def __str__(self) -> str:
        if not self.captured and not self.dropped:
            return "no graphs"
        shapes = count(len(self.captured), "shape")
        lines = [f"{shapes} in {self.seconds:.2f} s, {in_units(self.nbytes)} of graph memory"]
        for kind, sizes in by_kind(one.descriptor for one in self.captured).items():
            some = [one for one in self.captured if one.descriptor.kind == kind]
            graphs, launches = sum(one.graphs for one in some), sum(one.launches for one in some)
            lines.append(
                f"  {kind}: {sizes}; {count(graphs, 'graph')}, {launches:,} launches, "
                f"{in_units(sum(one.nbytes for one in some))}"
            )
        lines += [f"  not captured: {line}" for line in dropped_lines(self.dropped)]
        return "\n".join(lines)


def by_kind(descriptors: Iterable[BatchDescriptor]) -> dict[str, str]:
    """Kind -> its sizes in words, ascending: ``{"full, plain decodes": "1, 2, 4 tokens"}``."""
    sizes: dict[str, list[int]] = {}
    for one in descriptors:
        sizes.setdefault(one.kind, []).append(one.num_tokens)
    return {kind: token_counts(sorted(found)) for kind, found in sizes.items()}


def dropped_lines(dropped: dict[BatchDescriptor, str]) -> list[str]:
    """A line a kind of what has no graph: its sizes, and the reason of the smallest, which all its larger ones share:
    ``full, plain decodes: 4, 8 tokens (out of memory: ...)``."""
    smallest: dict[str, BatchDescriptor] = {}
    for one in dropped:
        if one.kind not in smallest or one.num_tokens < smallest[one.kind].num_tokens:
            smallest[one.kind] = one
    return [f"{kind}: {sizes} ({dropped[smallest[kind]]})" for kind, sizes in by_kind(dropped).items()]


def token_counts(sizes: Sequence[int], most: int = 8) -> str:
    """``1, 2, 4 tokens`` of ascending sizes; in the middle of more than ``most`` sizes, dots."""
    words = [f"{size:,}" for size in sizes]
    if len(words) > most:
        words = [*words[: most // 2], "...", *words[-(most // 2) :]]
    return f"{', '.join(words)} {'token' if list(sizes) == [1] else 'tokens'}" + (
        f" ({len(sizes)} sizes)" if len(sizes) > most else ""
    )


def in_units(nbytes: int) -> str:
    """``14.2 KiB``, ``3.0 MiB``: a number of bytes to read."""
    return f"{nbytes / 2**10:,.1f} KiB" if nbytes < 2**20 else f"{nbytes / 2**20:,.1f} MiB"
