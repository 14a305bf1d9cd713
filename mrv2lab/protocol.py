"""What crosses a line: between scheduler and runner, runner and model, engine and user.

Plain values without torch. Request ids are strings. Block ids come as a tuple over KV-cache groups. Shapes use
r = requests in this step, t = tokens in this step, n = logits rows in this step, R = max_num_reqs, T =
max_num_batched_tokens, L = max_model_len, V = vocabulary, K = draft tokens a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch

BlockIds = tuple[list[int], ...]
"""Block ids of one request, one list a KV-cache group."""

NULL_BLOCK = 0
"""The block that is never handed out; what padding may read."""

_FLOAT32_MAX = float(np.finfo(np.float32).max)


Backend = Literal["spec", "triton", "interpret"]
"""Which of an op's forms runs: its NumPy or torch spec, the compiled kernel, or the kernel in Triton's interpreter."""


class TritonMissing(RuntimeError):
    """A Triton kernel was asked for where Triton cannot be imported."""


class Launchable(Protocol):
    """What the runtime needs of an operation; ``ops/_op.py`` makes them."""

    name: str
    write_index: tuple[int, ...]
    """Which arguments it writes; every other tensor argument is read."""
    launch: Any
    """``launch(kernel, *args)`` starts the compiled kernel."""
    kernel: Any
    """``kernel.load()`` is the compiled kernel."""

    def execute(self, backend: Backend, args: tuple[Any, ...]) -> None:
        """Run now; for queued work."""


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens for one request.

    Raises ``ValueError`` naming the field, the value and the range when a value is out of range.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    """0 = greedy (ties to the lowest id)."""
    seed: int | None = None
    """None: the engine draws one at submit. Same seed, position and logits give the same token, always."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if not _is_int(self.max_tokens) or self.max_tokens < 1:
            raise ValueError(f"max_tokens must be an integer >= 1, got {self.max_tokens!r}")
        if not (_is_int(self.temperature) or isinstance(self.temperature, (float, np.floating))):
            raise ValueError(f"temperature must be a number >= 0, got {self.temperature!r}")
        if not 0 <= self.temperature < float("inf"):  # false for NaN
            raise ValueError(f"temperature must be finite and >= 0, got {self.temperature!r}")
        if self.temperature > _FLOAT32_MAX:
            raise ValueError(f"temperature must be at most {_FLOAT32_MAX:.3g}, as float32, got {self.temperature!r}")
        if self.seed is not None and not (_is_int(self.seed) and -(2**63) <= self.seed < 2**63):
            raise ValueError(f"seed must be None or a 64-bit integer, got {self.seed!r}")
        if not isinstance(self.stop_token_ids, Iterable):
            raise ValueError(f"stop_token_ids must be a sequence of token ids, got {self.stop_token_ids!r}")
        # Any iterable is welcome, once: a generator would be empty when it is read again.
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for token in self.stop_token_ids:
            if not _is_int(token) or token < 0:
                raise ValueError(f"stop_token_ids must be token ids >= 0, got {token!r}")


def _is_int(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


# -- scheduler -> runner -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RequestData:
    """A request that the runner must (re)build from nothing: new, or resumed after preemption.

    ``all_token_ids`` are the tokens known now: the prompt for a new request, prompt + outputs for a resumed one, so
    ``prompt_len <= len(all_token_ids)`` (= prefill_len). ``block_ids`` is the whole table, prefix hits included.
    ``num_computed_tokens`` counts the tokens whose KV is valid already (prefix hits).
    """

    req_id: str
    prompt_len: int
    all_token_ids: list[int]
    sampling: SamplingParams
    seed: int
    seed_given: bool
    block_ids: BlockIds
    num_computed_tokens: int


@dataclass(frozen=True, slots=True)
class ContinuedData:
    """The diff for requests that ran before and keep their row: parallel lists over ``req_ids``.

    ``num_computed_tokens`` int32[c] and ``num_output_tokens`` int32[c] are the scheduler's optimistic values *before*
    this step. ``new_block_ids`` holds only the requests that got blocks in this step: to be appended.
    """

    req_ids: list[str] = field(default_factory=list)
    num_computed_tokens: np.ndarray[Any, np.dtype[np.int32]] = field(default_factory=lambda: np.empty(0, np.int32))
    num_output_tokens: np.ndarray[Any, np.dtype[np.int32]] = field(default_factory=lambda: np.empty(0, np.int32))
    new_block_ids: dict[str, BlockIds] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step's schedule, neutral between runners; ``engine/projections.py`` makes each runner's message.

    new, continued and resumed partition the keys of ``num_scheduled_tokens``. ``finished`` and ``preempted`` are the
    requests that ended, or lost their blocks, since the previous schedule; ``unscheduled`` are running requests that
    get no token in this step (an MRV2 row stays untouched; a V1 row is evicted). A step with no tokens is legal: it
    only carries ``finished`` and ``preempted``.
    """

    step: int
    new: list[RequestData] = field(default_factory=list)
    continued: ContinuedData = field(default_factory=ContinuedData)
    resumed: list[RequestData] = field(default_factory=list)
    finished: set[str] = field(default_factory=set)
    preempted: set[str] = field(default_factory=set)
    unscheduled: set[str] = field(default_factory=set)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    """The batch: a request is in the step iff it is a key. Draft tokens are counted in."""
    scheduled_draft_tokens: dict[str, list[int]] = field(default_factory=dict)
    """Only requests with drafts; under async scheduling the values are -1 placeholders."""
    total_num_scheduled_tokens: int = 0


@dataclass(frozen=True, slots=True)
class MRV2SchedulerOutput:
    """MRV2's message: a resumed request is new, a preempted one is finished."""

    step: int
    new_reqs: list[RequestData]
    cached_reqs: ContinuedData
    finished_req_ids: set[str]
    preempted_req_ids: set[str]
    num_scheduled_tokens: dict[str, int]
    scheduled_draft_tokens: dict[str, list[int]]
    total_num_scheduled_tokens: int

    @property
    def removed_req_ids(self) -> list[str]:
        """Whose rows are freed at the start of the step, sorted, so that every rank frees rows alike.

        Some may have no row: aborted while waiting, or finished by a stale token after a preemption.
        """
        return sorted(self.finished_req_ids | self.preempted_req_ids)


@dataclass(frozen=True, slots=True)
class V1CachedData:
    """V1's diff for requests that its worker remembers, running or resumed: parallel lists over ``req_ids``.

    ``num_computed_tokens`` int32[c] and ``num_output_tokens`` int32[c] are the scheduler's optimistic values *before*
    this step. ``new_block_ids`` are to be appended; those of a resumed request are its whole table and replace what it
    had. ``all_token_ids`` has the known tokens of the requests that were not scheduled in the previous step: their row
    is gone, and the worker's copy of their outputs may hold placeholders.
    """

    req_ids: list[str]
    resumed_req_ids: set[str]
    new_block_ids: dict[str, BlockIds]
    num_computed_tokens: np.ndarray[Any, np.dtype[np.int32]]
    num_output_tokens: np.ndarray[Any, np.dtype[np.int32]]
    all_token_ids: dict[str, list[int]]


@dataclass(frozen=True, slots=True)
class V1SchedulerOutput:
    """V1's message: a resumed request is cached, and who was preempted or got no token is not said: who is in the
    worker's batch and not a key of ``num_scheduled_tokens`` loses its row."""

    step: int
    new_reqs: list[RequestData]
    cached_reqs: V1CachedData
    finished_req_ids: set[str]
    num_scheduled_tokens: dict[str, int]
    scheduled_draft_tokens: dict[str, list[int]]
    total_num_scheduled_tokens: int


# -- runner -> engine --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """What a step produced, on the host. ``sampled_token_ids[i]`` belongs to ``req_ids[i]``; an empty list is a prefill
    chunk that did not reach the end of its prompt; more than one token comes from accepted drafts."""

    step: int
    req_ids: list[str]
    sampled_token_ids: list[list[int]]


class AsyncModelRunnerOutput(Protocol):
    """A step's output that may still be on its way: ``get_output`` waits for it, and is called exactly once."""

    def get_output(self) -> ModelRunnerOutput: ...


# -- runner -> attention and model -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CommonAttentionMetadata:
    """What every attention backend is built from, one object a KV-cache group.

    ``max_query_len`` and ``max_seq_len`` are bounds known on the host (max_seq_len an upper bound: drafts may be
    rejected); the exact lengths are on the device.
    """

    # [r + 1] int32, device
    query_start_loc: torch.Tensor
    # [r + 1] int32, host
    query_start_loc_np: np.ndarray[Any, np.dtype[np.int32]]
    # [r] int32, device
    seq_lens: torch.Tensor
    # [r] int32, host upper bounds
    seq_lens_np_upper_bound: np.ndarray[Any, np.dtype[np.int32]]
    num_reqs: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    # [r, B] int32, device
    block_table: torch.Tensor
    # [t] int64, device; -1 = write nothing
    slot_mapping: torch.Tensor


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """The decoder's inputs for one step: views of fixed-address buffers."""

    # [t] int32
    input_ids: torch.Tensor
    # [t] int64
    positions: torch.Tensor
    # one entry a KV-cache group, as the attention backend's builder made it
    attn_metadata: tuple[Any, ...]


class Model(Protocol):
    """What a runner needs of a decoder. Both calls only queue work."""

    def forward(self, inputs: ForwardInputs) -> torch.Tensor:
        """Hidden states [t, H] on the device."""

    def compute_logits(self, logits_indices: torch.Tensor, n: int) -> torch.Tensor:
        """Logits [n, V] of the tokens at ``logits_indices`` int64[n] of the last forward."""


class ModelState:
    """What a model brings to the runner beyond tokens and KV: hooks that default to nothing.

    A model with M-RoPE positions, recurrent state or an encoder subclasses it, so that the runner has no ``if``.
    ``row`` is the request's permanent row.
    """

    def add_request(self, row: int, request: RequestData) -> None:
        """A request took ``row``: overwrite every per-row table (rows are recycled without clearing)."""

    def remove_request(self, row: int) -> None:
        """The request of ``row`` finished or was preempted."""

    def apply_staged_writes(self) -> None:
        """Flush what ``add_request`` staged, once a step, before the inputs are prepared."""

    def prepare_inputs(self, batch: Any, inputs: ForwardInputs) -> ForwardInputs:
        """Replace or extend the decoder's inputs for this step."""
        return inputs

    def postprocess(self, batch: Any) -> None:
        """After sampling, in stream order behind ``post_update``."""
