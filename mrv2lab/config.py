"""What is fixed before the first step: frozen dataclasses that check themselves, and model presets."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Literal, get_args

DType = Literal["float32", "float16", "bfloat16"]
TransferName = Literal["unsafe", "barrier", "pinned_copy", "uva_pool"]
StreamName = Literal["deferred", "threaded"]
KernelName = Literal["auto", "triton", "spec", "interpret"]
RunnerName = Literal["mrv2", "v1"]
ReorderName = Literal["none", "decode_first", "mrv2"]
AttentionName = Literal["auto", "torch", "triton", "flashinfer"]
GraphMode = Literal["none", "piecewise", "full", "full_decode_only", "full_and_piecewise"]
"""Which steps replay a graph: none; all, cut at attention; all, whole; plain decodes, whole; or plain decodes whole and
the others cut at attention. vLLM's ``CUDAGraphMode``."""
LayerType = Literal["full_attention", "sliding_attention"]
LogprobsMode = Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]
"""Of the model's logits, or of those that were sampled from, masked and scaled; as log-softmax, or as they are."""

ARCHITECTURES: dict[str, bool] = {"LlamaForCausalLM": False, "MistralForCausalLM": False, "Qwen3ForCausalLM": True}
"""Supported decoders, by their name in a Hugging Face ``config.json``, and whether they norm q and k per head."""


def _positive(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if not _is_count(value) or value < 1:
            raise ValueError(f"{type(owner).__name__}.{name} must be a positive integer, got {value!r}")
        object.__setattr__(owner, name, int(value))  # of NumPy's, say


def _is_count(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= 0


def _one_of(owner: object, name: str, allowed: tuple[str, ...]) -> None:
    value = getattr(owner, name)
    if not isinstance(value, str) or value not in allowed:
        hint = did_you_mean(value, allowed)
        raise ValueError(f"{type(owner).__name__}.{name} must be one of {allowed}, got {value!r}{hint}")


def did_you_mean(value: object, known: Iterable[str]) -> str:
    """``; did you mean 'triton'?`` for the end of an error about a misspelt word; '' where no known one is near."""
    near = difflib.get_close_matches(value, list(known), 1) if isinstance(value, str) else []
    return f"; did you mean {near[0]!r}?" if near else ""


@dataclass(frozen=True)
class KVGroup:
    """Layers whose attention reaches equally far, so that they share one block table."""

    # tokens that a query sees, its own included; None = all
    window: int | None
    layers: tuple[int, ...]


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a Llama/Qwen3-style decoder. Field names follow Hugging Face's ``config.json``."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    qk_norm: bool = False
    eos_token_ids: tuple[int, ...] = ()
    dtype: DType = "float32"
    architecture: str = "LlamaForCausalLM"
    name: str = "random"
    sliding_window: int | None = None
    """Tokens that a query of a sliding layer sees, its own included."""
    layer_types: tuple[LayerType, ...] = ()
    """One a layer; () = every layer slides where ``sliding_window`` is given, and none elsewhere."""

    def __post_init__(self) -> None:
        _positive(
            self,
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "intermediate_size",
            "max_position_embeddings",
        )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is no multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, got {self.head_dim}")
        if self.architecture not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise ValueError(f"unsupported architecture {self.architecture!r}; supported: {known}")
        for name in ("rope_theta", "rms_norm_eps"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)!r}")
        _one_of(self, "dtype", get_args(DType))
        for token in self.eos_token_ids:
            if not _is_count(token) or token >= self.vocab_size:
                raise ValueError(f"eos token id {token!r} is outside the vocabulary of {self.vocab_size}")
        self._check_layer_types()

    def _check_layer_types(self) -> None:
        if self.sliding_window is not None:
            _positive(self, "sliding_window")
        if self.layer_types and len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types names {len(self.layer_types)} layers, the model has {self.num_hidden_layers}"
            )
        for kind in self.layer_types:
            if kind not in get_args(LayerType):
                raise ValueError(f"a layer type must be one of {get_args(LayerType)}, got {kind!r}")
        if "sliding_attention" in self.layer_types and self.sliding_window is None:
            raise ValueError("layer_types has sliding_attention, but sliding_window is None; say how far it reaches")

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """The layers by reach, full attention first: one block table each."""
        kinds = self.layer_types or ("sliding_attention" if self.sliding_window else "full_attention",) * (
            self.num_hidden_layers
        )
        full = tuple(layer for layer, kind in enumerate(kinds) if kind == "full_attention")
        sliding = tuple(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")
        groups = (KVGroup(None, full), KVGroup(self.sliding_window, sliding))
        return tuple(group for group in groups if group.layers)

    @property
    def q_size(self) -> int:
        """Width of the query projection."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the key (or value) projection."""
        return self.num_key_value_heads * self.head_dim


@dataclass(frozen=True)
class CacheConfig:
    """The paged KV cache. ``num_blocks`` counts block 0, the null block, which is never handed out; None = what a
    memory profile of the model leaves of ``gpu_memory_utilization`` (a share of the device's memory) once weights,
    state tables, the largest step and graphs have had theirs."""

    num_blocks: int | None = 512
    block_size: int = 16
    enable_prefix_caching: bool = True
    gpu_memory_utilization: float = 0.9
    memory_bytes: int | None = None
    """CPU only: how much memory the device is to have, in bytes; None = half of the machine's, and then ``num_blocks``
    None stops at what ``max_num_reqs`` requests of ``max_model_len`` can fill."""

    def __post_init__(self) -> None:
        given = [name for name in ("num_blocks", "memory_bytes") if getattr(self, name) is not None]
        _positive(self, "block_size", *given)
        share: Any = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, Real) or not 0 < float(share) <= 1:
            raise ValueError(f"gpu_memory_utilization is a share in (0, 1], got {share!r}")
        if self.num_blocks is not None and self.num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2 (block 0 is the null block), got {self.num_blocks}")
        if self.block_size & (self.block_size - 1):
            raise ValueError(f"block_size must be a power of two, got {self.block_size}")


@dataclass(frozen=True)
class SchedulerConfig:
    """Budgets of a step. R = max_num_reqs, T = max_num_batched_tokens, L = max_model_len."""

    max_num_reqs: int = 1024
    max_num_batched_tokens: int = 2048
    max_model_len: int = 1024
    policy: Literal["fcfs", "priority"] = "fcfs"
    long_prefill_token_threshold: int = 0
    """Longest prefill chunk while another request could use the budget; 0 means no cap."""
    reserve_full_sequence: bool = True
    """Admit a waiting request only if all its known tokens fit into free blocks at once."""
    async_scheduling: bool = True

    def __post_init__(self) -> None:
        _positive(self, "max_num_reqs", "max_num_batched_tokens", "max_model_len")
        _one_of(self, "policy", ("fcfs", "priority"))
        if not _is_count(self.long_prefill_token_threshold):
            raise ValueError(
                "long_prefill_token_threshold must be an integer >= 0 (0 = no cap), "
                f"got {self.long_prefill_token_threshold!r}"
            )

    @property
    def max_concurrent_steps(self) -> int:
        """Steps in flight at most: the engine's batch queue and the least depth of every host-buffer pool."""
        return 2 if self.async_scheduling else 1


@dataclass(frozen=True)
class SpecConfig:
    """Speculative decoding: K draft tokens a step (0 = off)."""

    num_speculative_tokens: int = 0

    def __post_init__(self) -> None:
        if not _is_count(self.num_speculative_tokens):
            raise ValueError(f"num_speculative_tokens must be an integer >= 0, got {self.num_speculative_tokens!r}")


@dataclass(frozen=True)
class RunnerConfig:
    """Which runner, on which machine, with which transfer policy and (on a CPU) which software stream."""

    runner: RunnerName = "mrv2"
    device: str = "auto"
    transfer: TransferName = "uva_pool"
    pool_depth: int = 2
    """Slots of each UVA buffer pool; safe while no more steps than this are in flight."""
    kernels: KernelName = "auto"
    stream: StreamName = "deferred"
    lag: int | None = None
    """Deferred stream only: how many steps the device trails the host; None = until a wait needs it, 0 = at once."""
    threads: int | None = None
    """CPU only: OpenMP threads of queued work. None = one for a model below 50 M parameters, else as torch is set."""
    reorder: ReorderName = "none"
    """V1 only: the order that the attention backend demands of the persistent batch: none (flash and triton backends),
    decodes before prefills, or MRV2's sort key, so that both runners form the same batches."""
    logprobs_mode: LogprobsMode = "raw_logprobs"
    """What log-probabilities are of, for all requests; those of prompts are always of the model's logits."""
    count_nans: bool = False
    """Count the NaN logits of each request, a pass over the logits a step. They count as -inf either way."""
    attention: AttentionName = "auto"
    """Attention backend: torch is the definition, triton ours, flashinfer an extra (CUDA). auto = torch where specs
    run, else triton."""
    fused_prepare: bool = False
    """MRV2 only: one launch prepares a batch without drafts (``ops/prepare_decode``, ``ops/prepare_batch``) in place of
    four or five; rows are not sent again while they are the last step's, and that each row samples one token is not
    counted again. Off, since all of that is what lessons show; a replay shows it either way."""
    protected: tuple[str, ...] | None = None
    """V1's barrier only: the buffers whose copies lie inside it; None = all. Leaving one out is V1's silent bug."""

    def __post_init__(self) -> None:
        choices = {
            "runner": ("mrv2", "v1"),
            "reorder": ("none", "decode_first", "mrv2"),
            "transfer": ("unsafe", "barrier", "pinned_copy", "uva_pool"),
            "kernels": ("auto", "triton", "spec", "interpret"),
            "stream": ("deferred", "threaded"),
            "attention": get_args(AttentionName),
            "logprobs_mode": get_args(LogprobsMode),
        }
        for name, allowed in choices.items():
            _one_of(self, name, allowed)
        _positive(self, "pool_depth", *(["threads"] if self.threads is not None else []))
        if self.lag is not None and not _is_count(self.lag):
            raise ValueError(f"lag is counted in steps and must be >= 0 or None, got {self.lag!r}")
        if self.runner == "v1" and self.fused_prepare:
            raise ValueError("fused_prepare is for runner='mrv2': V1 prepares decodes as every other batch")
        if self.runner == "mrv2" and self.reorder != "none":
            raise ValueError(f"reorder={self.reorder!r} is for runner='v1': MRV2 sorts each batch, no row moves")
        self._check_protected()

    def _check_protected(self) -> None:
        names: Any = self.protected
        if names is None:
            return
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"protected must be None (all) or a tuple of buffer names, got {names!r}")
        object.__setattr__(self, "protected", tuple(names))
        if self.runner != "v1" or self.transfer != "barrier":
            raise ValueError(
                f"protected says what V1's barrier protects, but runner={self.runner!r} with "
                f"transfer={self.transfer!r} has no such barrier; use runner='v1', transfer='barrier'"
            )


@dataclass(frozen=True)
class GraphConfig:
    """CUDA graphs (tapes on a CPU). Sizes are token counts; a step is padded to the nearest one that holds it."""

    cudagraph_mode: GraphMode = "none"
    cudagraph_capture_sizes: tuple[int, ...] | None = None
    """Ascending; None = 1, 2, 4, then every 8th to 256, then every 16th, up to twice max_num_reqs and 512 at most."""

    def __post_init__(self) -> None:
        _one_of(self, "cudagraph_mode", get_args(GraphMode))
        given: Any = self.cudagraph_capture_sizes
        if given is None:
            return
        # Any iterable, of NumPy's integers too; the error shows what was given, an iterator's contents included.
        sizes = list(given) if isinstance(given, Iterable) and not isinstance(given, (str, bytes)) else None
        if sizes is None or not all(_is_count(size) and size > 0 for size in sizes):
            raise ValueError(
                f"cudagraph_capture_sizes must be positive integers, got {given if sizes is None else sizes}"
            )
        sizes = [int(size) for size in sizes]
        object.__setattr__(self, "cudagraph_capture_sizes", tuple(sizes))
        if not sizes:
            raise ValueError("cudagraph_capture_sizes is empty; cudagraph_mode='none' captures nothing")
        if sizes != sorted(set(sizes)):
            raise ValueError(
                f"cudagraph_capture_sizes must ascend without repeats, got {sizes}; use {sorted(set(sizes))}"
            )


@dataclass(frozen=True)
class EngineConfig:
    """Everything an engine is built from."""

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    runner: RunnerConfig = field(default_factory=RunnerConfig)
    spec: SpecConfig = field(default_factory=SpecConfig)
    graphs: GraphConfig = field(default_factory=GraphConfig)

    def __post_init__(self) -> None:
        sizes = self.graphs.cudagraph_capture_sizes
        if sizes and sizes[-1] > self.scheduler.max_num_batched_tokens:
            raise ValueError(
                f"cudagraph_capture_sizes go up to {sizes[-1]}, but a step has at most max_num_batched_tokens = "
                f"{self.scheduler.max_num_batched_tokens} tokens; leave out the larger ones"
            )
        if self.scheduler.max_model_len > self.model.max_position_embeddings:
            raise ValueError(
                f"max_model_len {self.scheduler.max_model_len} exceeds the model's "
                f"max_position_embeddings {self.model.max_position_embeddings}"
            )


QWEN3_0_6B = ModelConfig(
    name="qwen3-0.6b-shape",
    architecture="Qwen3ForCausalLM",
    vocab_size=151_936,
    hidden_size=1024,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=3072,
    max_position_embeddings=40_960,
    rope_theta=1_000_000.0,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    qk_norm=True,
    dtype="bfloat16",
)
"""The performance model's shape; its weights are seeded random numbers."""

PRESETS: dict[str, ModelConfig] = {QWEN3_0_6B.name: QWEN3_0_6B}
