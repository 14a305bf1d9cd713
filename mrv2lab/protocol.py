"""What crosses a line: between scheduler and runner, runner and model, engine and user.

Plain values without torch. Request ids are strings. Block ids come as a tuple over KV-cache groups. Shapes use
r = requests in this step, t = tokens in this step, n = logits rows in this step, R = max_num_reqs, T =
max_num_batched_tokens, L = max_model_len, V = vocabulary, K = draft tokens a step.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar, overload

import numpy as np

from mrv2lab.sampling_params import SamplingParams as SamplingParams
from mrv2lab.sampling_params import StructuredOutput as StructuredOutput

if TYPE_CHECKING:
    import torch

BlockIds = tuple[list[int], ...]
"""Block ids of one request, one list a KV-cache group."""

NULL_BLOCK = 0
"""The block that is never handed out; what padding may read."""

Backend = Literal["spec", "triton", "interpret"]
"""Which of an op's forms runs: its NumPy or torch spec, the compiled kernel, or the kernel in Triton's interpreter."""


class TritonMissing(RuntimeError):
    """A Triton kernel was asked for where Triton cannot be imported."""


class Launchable(Protocol):
    """What the runtime needs of an operation; ``ops/_op.py`` makes them."""

    name: str
    write_index: tuple[int, ...]
    """Which arguments it writes; every other tensor argument is read."""

    def start(self, args: tuple[Any, ...]) -> None:
        """Launch the compiled kernel on torch's current stream."""

    def execute(self, backend: Backend, args: tuple[Any, ...]) -> None:
        """Run now; for queued work."""


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
    stop_token_ids: tuple[int, ...] = ()
    """All that end it, ascending: EOS unless ``sampling.ignore_eos``, and ``sampling.stop_token_ids``."""
    processors: tuple[LogitsFunction, ...] = ()
    """What :class:`LogitsProcessor` made for it, in the order of the engine's list. Not part of a recording."""


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


@dataclass(frozen=True, slots=True)
class GrammarOutput:
    """What structured requests of a step may sample: between ``execute_model`` and ``sample_tokens``."""

    req_ids: list[str]
    # [g, K + 1, ceil(V / 32)] int32, one row a logits row of each request; bit 0 of a word is its lowest token
    bitmask: np.ndarray[Any, np.dtype[np.int32]]


# -- runner -> engine --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of m tokens, on the host. Column 0 is the token itself, the others are the most likely ones,
    greatest first; what a row did not ask for is id -1 and -inf."""

    # [m, 1 + k] int32
    token_ids: np.ndarray[Any, np.dtype[np.int32]]
    # [m, 1 + k] float32
    values: np.ndarray[Any, np.dtype[np.float32]]
    # [m] int32: how many logits are at least the token's, itself counted: 1 is the best, ties count against it
    ranks: np.ndarray[Any, np.dtype[np.int32]]


Item = TypeVar("Item")


class MadeForReaders(Sequence[Item], Generic[Item]):
    """A list of one item for each of ``tokens`` int64[r], made only for who looks: most steps are content with the
    tokens. To others it is the list that it stands for."""

    __slots__ = ("tokens",)

    def __init__(self, tokens: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        self.tokens = tokens

    @abstractmethod
    def make(self, part: slice) -> list[Item]:
        """The items of ``part``."""

    def __len__(self) -> int:
        return len(self.tokens)

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...
    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        return self.make(index) if isinstance(index, slice) else self.make(slice(index, index + 1 or None))[0]

    def __iter__(self) -> Iterator[Item]:
        return iter(self[:])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self[:] == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self[:])


class OneTokenEach(MadeForReaders[list[int]]):
    """A list of one token for each request."""

    __slots__ = ()

    def make(self, part: slice) -> list[list[int]]:
        """See :meth:`MadeForReaders.make`."""
        return [[token] for token in self.tokens[part].tolist()]


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """What a step produced, on the host. ``sampled_token_ids[i]`` belongs to ``req_ids[i]``; an empty list is a prefill
    chunk that did not reach the end of its prompt; more than one token comes from accepted drafts."""

    step: int
    req_ids: list[str]
    sampled_token_ids: Sequence[list[int]]
    logprobs: Logprobs | None = None
    """Of every sampled token in the order of ``sampled_token_ids``, where a request of the batch asked for any."""
    prompt_logprobs: dict[str, Logprobs] = field(default_factory=dict)
    """Whole, once, of requests whose prompt was completed by this step: prompt_len - 1 rows each."""
    num_nans: dict[str, int] = field(default_factory=dict)
    """NaN logits of the requests that had some."""
    errors: dict[str, str] = field(default_factory=dict)
    """Requests that failed on their own, with the reason: a custom processor that raised, say."""


class AsyncModelRunnerOutput(Protocol):
    """A step's output that may still be on its way: ``get_output`` waits for it, and is called exactly once."""

    def get_output(self) -> ModelRunnerOutput: ...


# -- custom processors -------------------------------------------------------------------------------------------------


class LogitsProcessor(Protocol):
    """A stage of one's own, given to the engine as ``Engine(logits_processors=[...])``: behind bad words and in front
    of the temperature, in both runners, in the order of the list.

    One object serves a request for its whole life; ``make`` is called at submit on the host. Raising there refuses the
    request; raising in ``__call__``, or returning anything but float32[V], fails that request alone.
    """

    def make(self, params: SamplingParams) -> LogitsFunction | None:
        """The function for a request with these parameters (``params.extra_args`` holds its own), None = not used."""


class LogitsFunction(Protocol):
    """Called once a logits row inside queued work, on the device's tensors."""

    def __call__(self, output_token_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """``output_token_ids`` int32[k] generated so far, ``logits`` float32[V], which it may change in place and
        return. It must not wait for the device (no ``.item()``), which would stop the whole batch."""


# -- runner -> attention and model -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CommonAttentionMetadata:
    """What every attention backend is built from, one object a KV-cache group.

    ``max_query_len`` and ``max_seq_len`` are bounds known on the host (max_seq_len an upper bound: drafts may be
    rejected); the exact lengths are on the device. Where ``any_lengths``, a graph will keep what is made of this for
    batches of any query lengths: then the host's arrays say nothing of them, only the bounds do.
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
    any_lengths: bool = False


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

    def compute_logits(self, logits_indices: torch.Tensor, n: int, *, in_order: bool = False) -> torch.Tensor:
        """Logits [n, V] of the tokens at ``logits_indices`` int64[n] of the last forward. ``in_order``: whether the
        caller knows that these are 0, 1, 2, ..."""


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
