"""What the graphs cost, as a value that reads well in a notebook."""

from __future__ import annotations

from dataclasses import dataclass, field

from mrv2lab.graphs.descriptor import BatchDescriptor


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
        lines = [f"{len(self.captured)} shapes in {self.seconds:.2f} s, {in_units(self.nbytes)} of graph memory"]
        for mode in ("piecewise", "full"):
            some = [one for one in self.captured if one.descriptor.mode == mode]
            if some:
                sizes = ", ".join(str(size) for size in sorted({one.descriptor.num_tokens for one in some}))
                lines.append(
                    f"  {mode}: {sizes} tokens; {sum(one.graphs for one in some):,} graphs, "
                    f"{sum(one.launches for one in some):,} launches, {in_units(sum(one.nbytes for one in some))}"
                )
        lines += [f"  not captured: {descriptor}: {reason}" for descriptor, reason in self.dropped.items()]
        return "\n".join(lines)


def in_units(nbytes: int) -> str:
    """``14.2 KiB``, ``3.0 MiB``: a number of bytes to read."""
    return f"{nbytes / 2**10:,.1f} KiB" if nbytes < 2**20 else f"{nbytes / 2**20:,.1f} MiB"
