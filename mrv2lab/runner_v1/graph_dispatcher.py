"""V1's way from a step's shape to a captured graph: pad to the nearest capture size, make a key, look it up.

    FULL key -> the same relaxed to (tokens, None, False) among the PIECEWISE ones -> NONE: eager, and unpadded

The dispatcher owns keys, not graphs: those hide in the wrapper around the model (:mod:`graph_wrapper`), and the two
agree by looking at the same key. Counterpart in vLLM: ``CudagraphDispatcher`` in ``v1/cudagraph_dispatcher.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from mrv2lab.config import GraphConfig, GraphMode, SchedulerConfig

Mode = Literal["FULL", "PIECEWISE", "NONE"]

MAX_DEFAULT_SIZE = 512

ROUTINES: dict[GraphMode, tuple[Mode, Mode]] = {
    "none": ("NONE", "NONE"),
    "piecewise": ("PIECEWISE", "PIECEWISE"),
    "full": ("FULL", "FULL"),
    "full_decode_only": ("FULL", "NONE"),
    "full_and_piecewise": ("FULL", "PIECEWISE"),
}
"""What ``cudagraph_mode`` means for uniform decodes, and for any other batch."""


class GraphKey(NamedTuple):
    """A captured shape. vLLM: ``BatchDescriptor``."""

    num_tokens: int
    """Padded."""
    num_reqs: int | None
    """Padded; None = the graphs do not depend on it (attention is outside)."""
    uniform: bool
    """Whether it serves only batches in which every request has the tokens of a plain decode."""

    def __str__(self) -> str:
        return f"({self.num_tokens}, {self.num_reqs}, {'uniform' if self.uniform else 'any lengths'})"


@dataclass(frozen=True, slots=True)
class Decision:
    """What a step does, and one sentence that says why."""

    mode: Mode
    key: GraphKey | None
    """None: eager, nothing is padded."""
    reason: str

    @property
    def padded_tokens(self) -> int | None:
        """Tokens of the padded step; None = as many as there are."""
        return None if self.key is None else self.key.num_tokens

    @property
    def padded_reqs(self) -> int | None:
        """Requests of the padded attention metadata; None = as many as there are."""
        return None if self.key is None else self.key.num_reqs


EAGER = Decision("NONE", None, "asked for eagerly")
NOT_CAPTURED = Decision("NONE", None, "graphs are not captured yet")

Captured = tuple[Mode, GraphKey]


class GraphDispatcher:
    """See the module's docstring.

    ``full_graphs`` and ``backend`` are the attention backend's; ``decode_query_len`` is the tokens of a plain decode.
    Raises ``ValueError`` for capture sizes that pass ``max_num_batched_tokens``.
    """

    def __init__(
        self,
        graphs: GraphConfig,
        scheduler: SchedulerConfig,
        *,
        full_graphs: bool = True,
        backend: str = "attention",
        decode_query_len: int = 1,
    ) -> None:
        self.max_num_reqs = scheduler.max_num_reqs
        self.decode_query_len = decode_query_len
        self.mode, self.downgrade = _supported(graphs.cudagraph_mode, full_graphs, backend)
        """The mode that is built, and why it is not the one asked for ('' where it is)."""
        self.sizes = _capture_sizes(graphs, scheduler, decode_query_len) if self.mode != "none" else ()
        self.enabled = False
        """Whether the keys' graphs are there; before, every step is eager."""
        # [largest size + 1]: tokens -> the nearest size
        self._padded = _nearest(self.sizes)
        self.keys: dict[Mode, set[GraphKey]] = {"FULL": set(), "PIECEWISE": set()}
        self.dropped: dict[Captured, str] = {}
        """Keys whose graph could not be had, and why."""
        self._none = Decision("NONE", None, self.downgrade or "cudagraph_mode is 'none'")
        self._memo: dict[tuple[int, bool], Decision] = {}
        """(tokens, uniform) -> the decision, made on first use: its sentence costs more than the look-ups."""
        self._make_keys()

    def _make_keys(self) -> None:
        decode, mixed = ROUTINES[self.mode]
        if mixed != "NONE":
            self.keys[mixed].update(self._key(size, False) for size in self.sizes)
        if self._separate and decode == "FULL":
            most = self.decode_query_len * self.max_num_reqs
            fitting = (size for size in self.sizes if self.decode_query_len <= size <= most)
            self.keys["FULL"].update(self._key(size, True) for size in fitting)
        self.keys["PIECEWISE"] = {_relaxed(key) for key in self.keys["PIECEWISE"]}

    @property
    def _separate(self) -> bool:
        """Whether uniform decodes have graphs of their own."""
        decode, mixed = ROUTINES[self.mode]
        return decode != mixed

    def _key(self, num_tokens: int, uniform: bool) -> GraphKey:
        """The key that a step of so many tokens looks for first."""
        tokens = self._padded[num_tokens]
        uniform = uniform and self._separate
        reqs = tokens // self.decode_query_len if uniform else tokens
        return GraphKey(tokens, min(reqs, self.max_num_reqs), uniform)

    def to_capture(self) -> list[Captured]:
        """Every key in the order of capture: PIECEWISE first, then the largest first, so that the smaller ones reuse
        its memory."""
        modes: tuple[Mode, Mode] = ("PIECEWISE", "FULL")
        return [(mode, key) for mode in modes for key in sorted(self.keys[mode], key=_order, reverse=True)]

    def enable(self, yes: bool = True) -> None:
        """The graphs are there, or (``yes`` False) are not any more, and what was dropped may be tried again."""
        if not yes:
            for mode, key in self.dropped:
                self.keys[mode].add(key)
            self.dropped.clear()
        self.enabled = yes and bool(self.sizes)
        self._memo.clear()

    def drop(self, mode: Mode, key: GraphKey, reason: str) -> None:
        """This graph is not to be had; its steps look for the next key."""
        self.keys[mode].discard(key)
        self.dropped[mode, key] = reason
        self._memo.clear()

    # -- a step --------------------------------------------------------------------------------------------------------

    def dispatch(self, num_reqs: int, num_tokens: int, max_query_len: int) -> Decision:
        """The graph of a step of ``num_tokens`` tokens over ``num_reqs`` requests, the longest of ``max_query_len``."""
        if not self.enabled:
            return NOT_CAPTURED if self.sizes else self._none
        uniform = max_query_len == self.decode_query_len and num_tokens == num_reqs * max_query_len
        decision = self._memo.get((num_tokens, uniform))
        if decision is None:
            decision = self._memo[num_tokens, uniform] = self._decide(num_tokens, uniform)
        return decision

    def _decide(self, num_tokens: int, uniform: bool) -> Decision:
        tokens = f"{num_tokens:,} token" + "s" * (num_tokens != 1)
        if num_tokens > self.sizes[-1]:
            return Decision("NONE", None, f"{tokens} exceed the largest capture size {self.sizes[-1]:,}")
        key = self._key(num_tokens, uniform)
        padded = f"{tokens} " + (f"padded to {key.num_tokens:,}" if key.num_tokens != num_tokens else "need no padding")
        if key in self.keys["FULL"]:
            return Decision("FULL", key, f"{padded}; FULL has the key {key}")
        relaxed = _relaxed(key)
        if relaxed in self.keys["PIECEWISE"]:
            return Decision("PIECEWISE", relaxed, f"{padded}; {self._missed('FULL', key)}, relaxed to {relaxed}")
        missed = self._missed("FULL", key)
        if ROUTINES[self.mode][1] == "PIECEWISE":
            missed += f", and {self._missed('PIECEWISE', relaxed)}"
        return Decision("NONE", None, f"{tokens}: {missed}" + (f" under {self.mode}" if self._separate else ""))

    def _missed(self, mode: Mode, key: GraphKey) -> str:
        lost = self.dropped.get((mode, key))
        if lost is not None:
            return f"{mode} lost the key {key} ({lost})"
        return f"{mode} has no key {key}" + (f" ({self.downgrade})" if mode == "FULL" and self.downgrade else "")


def _supported(mode: GraphMode, full_graphs: bool, backend: str) -> tuple[GraphMode, str]:
    """What an attention backend leaves of ``mode``, and why ('' where it leaves all)."""
    decode, mixed = ROUTINES[mode]
    if full_graphs or decode != "FULL":
        return mode, ""
    reason = f"the {backend} backend plans on the host, so no full graphs"
    return ("none" if mixed == "NONE" else "piecewise"), reason


def _capture_sizes(graphs: GraphConfig, scheduler: SchedulerConfig, query_len: int) -> tuple[int, ...]:
    """Ascending: the configured sizes, or 1, 2, 4, every 8th to 256 and every 16th behind, up to twice the tokens of a
    full batch of decodes, :data:`MAX_DEFAULT_SIZE` and T; in multiples of ``query_len`` (vLLM #28207)."""
    limit = scheduler.max_num_batched_tokens
    sizes = graphs.cudagraph_capture_sizes
    if sizes is None:
        top = min(2 * scheduler.max_num_reqs * query_len, MAX_DEFAULT_SIZE, limit)
        every = (1, 2, 4, *range(8, 256, 8), *range(256, top + 1, 16))
        sizes = tuple(size for size in every if size <= top)
    elif sizes[-1] > limit:
        raise ValueError(
            f"cudagraph_capture_sizes go up to {sizes[-1]}, but a step has at most max_num_batched_tokens = {limit}"
        )
    rounded = {-(-size // query_len) * query_len for size in sizes}
    return tuple(sorted(size for size in rounded if size <= limit))


def _nearest(sizes: tuple[int, ...]) -> list[int]:
    """Tokens 0 to the largest size -> the smallest size that holds them."""
    padded = [sizes[0]] if sizes else [0]
    for size in sizes:
        padded += [size] * (size + 1 - len(padded))
    return padded


def _relaxed(key: GraphKey) -> GraphKey:
    return GraphKey(key.num_tokens, None, False)


def _order(key: GraphKey) -> tuple[int, int]:
    return key.num_tokens, key.num_reqs or 0
