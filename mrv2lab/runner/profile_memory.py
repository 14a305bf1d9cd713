"""What a step needs of the device's memory besides the KV cache, measured. Counterpart in vLLM: ``Worker.
determine_available_memory`` and ``profile_run``.

Measured over a dummy step of ``max_num_batched_tokens`` tokens, after requests that have allocated whatever a mixed
workload allocates on first use: a whole warm-up, which has loaded all kernels too, or its ``first_use``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mrv2lab.runtime.base import Runtime
from mrv2lab.runtime.device_memory import MemoryReading, peak_memory, read_memory


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Bytes of the device, by what has them while a step runs and the KV cache does not exist yet."""

    total: int
    utilization: float
    """Share of ``total`` that everything together may take."""
    tensors: int
    """Weights, state tables and buffers."""
    other: int
    """Context, kernels, libraries, other processes."""
    step_peak: int
    """Temporaries of the largest step, at most at once."""
    graphs: int
    """Estimate for the graphs that are captured once the KV cache is there."""

    @property
    def budget(self) -> int:
        """What everything together may take."""
        return int(self.total * self.utilization)

    @property
    def needed(self) -> int:
        """What is gone before the first KV block."""
        return self.tensors + self.other + self.step_peak + self.graphs

    @property
    def available(self) -> int:
        """What is left for the KV cache; negative where nothing is."""
        return self.budget - self.needed

    @property
    def missing(self) -> int:
        """What is needed above the budget; 0 where it suffices."""
        return max(0, -self.available)

    def parts(self) -> dict[str, int]:
        """Bytes by name, in the order of a bar: for tables and pictures. They add up to ``total``, or to ``needed``
        where that is more."""
        return {
            "weights, tables, buffers": self.tensors,
            "context, kernels, others": self.other,
            "largest step": self.step_peak,
            "graphs (estimate)": self.graphs,
            "KV cache": max(0, self.available),
            "left alone": max(0, self.total - max(self.budget, self.needed)),
        }

    def __str__(self) -> str:
        words = (f"{name} {size_words(nbytes)}" for name, nbytes in self.parts().items() if nbytes)
        over = f"; {size_words(self.missing)} over the budget of {size_words(self.budget)}" if self.missing else ""
        return f"{size_words(self.total)}: {', '.join(words)}{over}"


def profile_memory(
    rt: Runtime, step: Callable[[], object], *, utilization: float, total: int | None, graphs: int, without: int = 0
) -> MemoryProfile:
    """Measure ``step``, which queues the largest step there is. ``total`` replaces the size of a CPU's device memory.

    ``without``: bytes of tensors that are there for the profile only.
    """
    with peak_memory(rt) as peak:
        step()
    rt.synchronize()
    reading: MemoryReading = read_memory(rt, total)
    return MemoryProfile(reading.total, utilization, reading.allocated - without, reading.other, peak.nbytes, graphs)


def size_words(nbytes: int) -> str:
    """``3.4 GiB``."""
    size, units = float(nbytes), ("B", "KiB", "MiB", "GiB", "TiB")
    for unit in units:
        if abs(size) < 1024 or unit == units[-1]:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError
