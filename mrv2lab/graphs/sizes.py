"""The token counts that get a graph. Counterpart in vLLM: ``VllmConfig._set_cudagraph_sizes``."""

from __future__ import annotations

from mrv2lab.config import GraphConfig, SchedulerConfig

MAX_DEFAULT_SIZE = 512
"""Larger steps keep the device busy for longer than their launches take."""


def capture_sizes(graphs: GraphConfig, scheduler: SchedulerConfig, decode_query_len: int = 1) -> tuple[int, ...]:
    """Ascending token counts: the configured ones, or 1, 2, 4, every 8th to 256 and every 16th behind, up to
    2 R ``decode_query_len``, :data:`MAX_DEFAULT_SIZE` and T at most. Raises ``ValueError`` for a size above T."""
    limit = scheduler.max_num_batched_tokens
    sizes = graphs.cudagraph_capture_sizes
    if sizes is not None:
        if sizes[-1] > limit:
            raise ValueError(
                f"cudagraph_capture_sizes go up to {sizes[-1]}, but a step has at most max_num_batched_tokens = {limit}"
            )
        return sizes
    top = min(2 * scheduler.max_num_reqs * decode_query_len, MAX_DEFAULT_SIZE, limit)
    return tuple(size for size in (1, 2, 4, *range(8, 256, 8), *range(256, top + 1, 16)) if size <= top)
