"""Exercises of the lesson on graphs: a learner's answer against the table, the manager and the padding rules.

check_dispatch(lambda reqs, tokens, longest: ...)      # -> right. / not yet: ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from mrv2lab.config import GraphConfig, SchedulerConfig
from mrv2lab.graphs import CudaGraphManager, DispatchTable
from mrv2lab.graphs.padding import tail_faults
from mrv2lab.teach.graph_lesson import best_sizes, padding_of
from mrv2lab.teach.sampling_exercises import Verdict

SIZES = (1, 2, 4, 8)
REQS = 6
"""What the exercise on dispatch is about: these capture sizes, at most this many requests."""


def check_dispatch(graph: Callable[[int, int, int], Any]) -> Verdict:
    """``graph(num_reqs, num_tokens, max_query_len)`` -> ``("full", tokens)``, ``("piecewise", tokens)`` or None (eager)
    under ``full_and_piecewise`` with capture sizes 1, 2, 4, 8 and at most 6 requests."""
    table = DispatchTable(GraphConfig("full_and_piecewise", SIZES), SchedulerConfig(REQS, 64, 64))
    for tokens in range(1, 12):
        for reqs in range(1, min(tokens, REQS) + 1):
            longest = tokens - reqs + 1
            decision = table.dispatch(reqs, tokens, longest)
            want = None if decision.descriptor is None else (decision.mode, decision.padded_tokens)
            got = graph(reqs, tokens, longest)
            if got != want and not (got is not None and want is not None and tuple(got) == want):
                batch = f"{reqs} requests with {tokens} tokens, the longest {longest}"
                return Verdict(
                    False, f"{batch}: you say {got!r}, the table {want!r}. {_hint(got, want, tokens, longest)}"
                )
    return Verdict(True, "Plain decodes go whole, the others in pieces, and what no size holds runs eagerly, unpadded.")


def _hint(got: Any, want: tuple[str, int | None] | None, tokens: int, longest: int) -> str:
    if want is None:
        return f"No captured size holds {tokens} tokens."
    if got is None:
        return "Some captured size holds it."
    if got[0] != want[0]:
        return f"Is every request a plain decode, with one token? The longest here has {longest}."
    return (
        f"Of the shapes that hold {tokens} tokens the smallest is taken; no full graph has more than {REQS} requests."
    )


def check_sizes(sizes: Sequence[int], tokens: Iterable[int], most: int = 4, slack: float = 1.05) -> Verdict:
    """At most ``most`` capture sizes under which steps of so many ``tokens`` all have a graph and compute as little for
    nothing as can be (``slack`` times the least, at most)."""
    steps = list(tokens)
    if not sizes or not all(isinstance(size, (int, np.integer)) and size > 0 for size in sizes):
        return Verdict(False, f"sizes are positive integers, got {sizes!r}")
    if len(set(sizes)) > most:
        return Verdict(False, f"{len(set(sizes))} sizes are more than {most}: each costs memory and time at start")
    eager = sum(n > max(sizes) for n in steps)
    if eager:
        return Verdict(
            False, f"{eager} steps are larger than {max(sizes)} and run eagerly; the largest has {max(steps)}"
        )
    best = padding_of(steps, best_sizes(steps, most))
    waste = padding_of(steps, sizes)
    if waste > slack * best:
        return Verdict(False, f"{waste:,} tokens are computed for nothing; {most} sizes can do with {best:,}")
    return Verdict(True, f"{waste:,} of {sum(steps) + waste:,} tokens are computed for nothing; the least is {best:,}.")


Pad = Callable[..., None]


def check_padding(pad: Pad) -> Verdict:
    """``pad(num_reqs, num_tokens, query_start_loc, seq_lens, block_table, slot_mapping)`` makes the tails of a step's
    inputs safe, in place. They are NumPy arrays that hold an earlier, larger batch; what belongs to this step's
    requests and tokens must stay."""
    for reqs, tokens in ((2, 2), (1, 3), (4, 5), (4, 6)):
        stale = _larger_batch()
        starts = stale["query_start_loc"]
        starts[1 : reqs + 1] = np.linspace(tokens / reqs, tokens, reqs).astype(np.int32)
        kept = {name: array.copy() for name, array in stale.items()}
        try:
            pad(reqs, tokens, *stale.values())
        except Exception as error:
            return Verdict(
                False, f"{reqs} requests, {tokens} tokens: your function raised {type(error).__name__}: {error}"
            )
        used = {"query_start_loc": reqs + 1, "seq_lens": reqs, "block_table": reqs, "slot_mapping": tokens}
        for name, n in used.items():
            if not np.array_equal(stale[name][:n], kept[name][:n]):
                return Verdict(
                    False, f"{reqs} requests, {tokens} tokens: you changed {name}[:{n}], which is this step's"
                )
        faults = tail_faults(reqs, tokens, *stale.values())
        if faults:
            return Verdict(False, f"{reqs} requests, {tokens} tokens: {faults[0]}")
    return Verdict(
        True, "Nothing is written (slots), nothing is read (lengths, blocks), and padding rows own no token."
    )


def _larger_batch() -> dict[str, np.ndarray[Any, Any]]:
    """A batch of 4 requests with 6 tokens, in the argument order of ``pad``."""
    return {
        "query_start_loc": np.array([0, 1, 2, 4, 6], np.int32),
        "seq_lens": np.array([17, 5, 40, 9], np.int32),
        "block_table": np.array([[3, 4, 0], [6, 0, 0], [7, 1, 2], [5, 0, 0]], np.int32),
        "slot_mapping": np.array([64, 100, 46, 47, 87, 88], np.int64),
    }


def check_moved(manager: CudaGraphManager, answer: str | None) -> Verdict:
    """Which buffer do the graphs look for in the wrong place? ``answer`` is its name."""
    found = {line.split("'")[1] for line in manager.audit()}
    if not found:
        return Verdict(False, "no buffer has moved since the capture; look while the bug is there")
    if answer is None:
        return Verdict(False, "write the buffer's name, such as 'positions'")
    if answer not in found:
        names = {name for graphs in manager.captured for name in manager.buffers(graphs)}
        known = "is where it was" if answer in names else f"is no buffer that graphs touch: {', '.join(sorted(names))}"
        return Verdict(False, f"{answer!r} {known}")
    return Verdict(True, f"Every graph that reads {answer!r} reads what was there when it was captured.")


def check_launches(manager: CudaGraphManager, *, eager: int, piecewise: int, full: int) -> Verdict:
    """How many times the host launches something for one forward pass: every segment alone, in pieces with attention
    between them, and as one graph. ``manager`` has captured both kinds."""
    costs = list(manager.captured.values())
    whole = next((one for one in costs if one.descriptor.mode == "full"), None)
    cut = next((one for one in costs if one.descriptor.mode == "piecewise"), None)
    if whole is None or cut is None:
        return Verdict(False, "this manager has not captured both kinds; use cudagraph_mode='full_and_piecewise'")
    attentions = whole.launches - cut.launches
    right = {"eager": whole.launches, "piecewise": cut.graphs + attentions, "full": 1}
    hints = {
        "eager": "embed and the final norm once, and what a layer has for each layer",
        "piecewise": "attention stands between two pieces, once a layer, and is launched itself",
        "full": "what is captured whole is launched whole",
    }
    for name, answer in {"eager": eager, "piecewise": piecewise, "full": full}.items():
        if answer != right[name]:
            return Verdict(False, f"{name}: {answer!r} is not it. Count again: {hints[name]}")
    return Verdict(True, f"{right['eager']} launches become {right['piecewise']}, or 1.")
