"""A Llama/Qwen3-style decoder in segments, each one launch of the runtime over preallocated buffers.

    embed | before_attention, attention, after_attention (a layer) | final_norm | logits

A segment is the unit of deferral, of a tape and of piecewise graph capture: attention alone depends on the batch's
composition, the others on its token count only. Weights are constants of the segment's function.

    before_attention    norm, qkv product
    attention           q/k norm, rotary, KV write; then the attention backend
    after_attention     output product, norm, gate and up products, SwiGLU's gate, down product

Which kernels do that is products.py's choice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mrv2lab.attention.builder import AttentionBackend
from mrv2lab.attention.create import make_backend
from mrv2lab.config import ModelConfig
from mrv2lab.model.names import EMBED, FINAL_NORM, LM_HEAD, check_shapes, layer_name
from mrv2lab.model.products import Products, Weight
from mrv2lab.model.rope import rope_table
from mrv2lab.ops.rotary_kv_write import rotary_kv_write
from mrv2lab.protocol import ForwardInputs

if TYPE_CHECKING:
    from mrv2lab.runtime.base import Runtime

KVCache = tuple[torch.Tensor, torch.Tensor]
"""One layer's keys and values, each [num_blocks, block_size, Hk, D]."""


class Decoder:
    """Hidden states and logits of one step's tokens.

    ``weights`` are host tensors by Hugging Face's names (``model/names.py``) in ``config.dtype``; they are fused
    (q, k, v; gate, up) and adopted by ``rt``, so the caller may drop them. ``prefix`` keeps the segment names of two
    decoders of one runtime apart. ``attention`` (default: the backend that fits ``rt``) must have made the steps'
    ``attn_metadata``, one entry for each of ``config.kv_groups``; ``layer_to_group`` says otherwise which entry a layer
    uses. ``products`` replaces the choice of kernels, for measurements.
    Raises ``CheckpointError`` if the weights do not fit the config.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, torch.Tensor],
        rt: Runtime,
        max_num_tokens: int,
        *,
        max_num_logits: int | None = None,
        max_model_len: int | None = None,
        attention: AttentionBackend | None = None,
        layer_to_group: Sequence[int] | None = None,
        products: Products | None = None,
        prefix: str = "",
    ) -> None:
        check_shapes({name: tuple(tensor.shape) for name, tensor in weights.items()}, config, "weights")
        self.config = config
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.max_num_tokens = max_num_tokens
        self.max_num_logits = max_num_logits or max_num_tokens
        self.attention = attention or make_backend(rt)
        group_of = {layer: i for i, group in enumerate(config.kv_groups) for layer in group.layers}
        self.layer_to_group = tuple(layer_to_group or (group_of[i] for i in range(config.num_hidden_layers)))
        self._windows = [config.kv_groups[group_of[i]].window for i in range(config.num_hidden_layers)]
        self.products = products or Products(rt.backend, config)
        self._rt = rt
        self._prefix = prefix
        self._weights = weights
        self._kv_caches: list[KVCache] = []

        def buffer(name: str, rows: int, width: int) -> torch.Tensor:
            return rt.empty((rows, width), self.dtype, name=prefix + name)

        rows = max_num_tokens
        # [T, H]: input of the next segment, and at last the decoder's output
        self.hidden = buffer("hidden", rows, config.hidden_size)
        # [T, H]
        self._residual = buffer("residual", rows, config.hidden_size)
        # float32[S, tokens, H], or nothing: a product that is still to be summed (products.py)
        self._partials: tuple[torch.Tensor, ...] = ()
        if self.products.partials_shape:
            shape = (*self.products.partials_shape, config.hidden_size)
            self._partials = (rt.empty(shape, torch.float32, name=prefix + "partials"),)
        # [T, (Hq + 2 Hk) * D]
        self._qkv = buffer("qkv", rows, config.q_size + 2 * config.kv_size)
        # [T, Hq * D]
        self._attn_out = buffer("attn_out", rows, config.q_size)
        # [T, 2 I]
        self._gate_up = buffer("gate_up", rows, 2 * config.intermediate_size)
        # [T, I]
        self._act = buffer("act", rows, config.intermediate_size)
        # [N, H]: hidden states of the rows that get logits
        self._logits_in = buffer("logits_in", self.max_num_logits, config.hidden_size)
        # [N, V]
        self.logits = buffer("logits", self.max_num_logits, config.vocab_size)
        self._logits_views = self.max_num_logits, self._logits_in, self.logits
        """The first rows of both that were asked for last: steps in a row ask for the same, and get the same views."""

        length = max_model_len or config.max_position_embeddings
        cos, sin = rope_table(length, config.head_dim, config.rope_theta)
        self._cos, self._sin = self._adopt("rope.cos", cos), self._adopt("rope.sin", sin)
        embedding = self._adopt(EMBED, weights[EMBED])
        self._register_ends(embedding)
        for layer in range(config.num_hidden_layers):
            self._register_before(layer)
            self._register_attention(layer)
            self._register_after(layer)
        del self._weights

    # -- construction --------------------------------------------------------------------------------------------------

    def _adopt(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The plain device tensor behind a constant, for use inside segment functions."""
        return self._rt.raw(self._rt.adopt(tensor.contiguous(), self._prefix + name))

    def _weight(self, *names: str) -> torch.Tensor:
        """Weights stacked along their rows and adopted under the first one's name."""
        tensors = [self._weights[name] for name in names]
        return self._adopt(names[0], tensors[0] if len(tensors) == 1 else torch.cat(tensors))

    def _product(self, *names: str) -> Weight:
        """The same for a matrix."""
        return Weight.of(self._weight(*names))

    def _segment(self, name: str, fn: Any) -> None:
        self._rt.register(self._prefix + name, self.products.paced(fn))

    def _register_ends(self, embedding: torch.Tensor) -> None:
        products = self.products
        norm = self._weight(FINAL_NORM)
        head = Weight.of(embedding) if self.config.tie_word_embeddings else self._product(LM_HEAD)

        def embed(residual: torch.Tensor, input_ids: torch.Tensor) -> None:
            torch.index_select(embedding, 0, input_ids, out=residual)

        def final_norm(hidden: torch.Tensor, residual: torch.Tensor, partials: torch.Tensor | None = None) -> None:
            products.final_norm(hidden, residual, partials, norm)

        def logits(
            out: torch.Tensor, rows: torch.Tensor, hidden: torch.Tensor, indices: torch.Tensor, in_order: bool
        ) -> None:
            products.logits(out, rows, hidden, indices, head, in_order=in_order)

        self._segment("embed", embed)
        self._segment("final_norm", final_norm)
        self._segment("logits", logits)

    def _register_before(self, layer: int) -> None:
        products = self.products
        norm = self._weight(layer_name(layer, "input_layernorm"))
        qkv_proj = self._product(*(layer_name(layer, f"self_attn.{x}_proj") for x in "qkv"))

        def before(
            qkv: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor, partials: torch.Tensor | None = None
        ) -> None:
            products.norm_qkv(qkv, hidden, residual, partials, norm, qkv_proj, first=layer == 0)

        self._segment(f"layer.{layer}.before_attention", before)

    def _register_attention(self, layer: int) -> None:
        config, backend, eps = self.config, self._rt.backend, self.config.rms_norm_eps
        q_norm = k_norm = None
        if config.qk_norm:
            q_norm = self._weight(layer_name(layer, "self_attn.q_norm"))
            k_norm = self._weight(layer_name(layer, "self_attn.k_norm"))
        q_heads, head_dim, scale = config.num_attention_heads, config.head_dim, config.head_dim**-0.5
        rope = (self._cos, self._sin, q_norm, k_norm, eps)
        attend, window = self.attention.attend, self._windows[layer]

        def attention(
            out: torch.Tensor,
            qkv: torch.Tensor,
            key_cache: torch.Tensor,
            value_cache: torch.Tensor,
            positions: torch.Tensor,
            slot_mapping: torch.Tensor,
            *args: Any,
        ) -> None:
            rotary_kv_write.execute(backend, (qkv, key_cache, value_cache, positions, slot_mapping, *rope))
            q = qkv.unflatten(1, (-1, head_dim))[:, :q_heads]
            attend(out.unflatten(1, (-1, head_dim)), q, key_cache, value_cache, args, scale, window)

        self._segment(f"layer.{layer}.attention", attention)

    def _register_after(self, layer: int) -> None:
        products = self.products
        o_proj = self._product(layer_name(layer, "self_attn.o_proj"))
        norm = self._weight(layer_name(layer, "post_attention_layernorm"))
        gate_up_proj = self._product(layer_name(layer, "mlp.gate_proj"), layer_name(layer, "mlp.up_proj"))
        down_proj = self._product(layer_name(layer, "mlp.down_proj"))

        def after(
            attn_out: torch.Tensor,
            gate_up: torch.Tensor,
            act: torch.Tensor,
            hidden: torch.Tensor,
            residual: torch.Tensor,
            partials: torch.Tensor | None = None,
        ) -> None:
            products.o_proj(hidden, residual, partials, attn_out, o_proj)
            products.norm_gate_up(act, gate_up, hidden, residual, partials, norm, gate_up_proj)
            products.down(hidden, residual, partials, act, down_proj)

        self._segment(f"layer.{layer}.after_attention", after)

    # -- use -----------------------------------------------------------------------------------------------------------

    def bind_kv_cache(self, kv_caches: Sequence[KVCache]) -> None:
        """Give every layer its (key_cache, value_cache), each [num_blocks, block_size, Hk, D]. The caller owns them."""
        config = self.config
        if len(kv_caches) != config.num_hidden_layers:
            raise ValueError(f"{len(kv_caches)} KV caches for {config.num_hidden_layers} layers")
        for layer, pair in enumerate(kv_caches):
            for cache in pair:
                if tuple(cache.shape[2:]) != (config.num_key_value_heads, config.head_dim) or cache.dtype != self.dtype:
                    raise ValueError(
                        f"layer {layer}'s KV cache is {list(cache.shape)} {cache.dtype}, expected [num_blocks, "
                        f"block_size, {config.num_key_value_heads}, {config.head_dim}] {self.dtype}"
                    )
        self._kv_caches = list(kv_caches)

    def forward(self, inputs: ForwardInputs) -> torch.Tensor:
        """Queue the decoder over t tokens; returns the view [t, H] that will hold their final hidden states."""
        if not self._kv_caches:
            raise RuntimeError("no KV cache is bound; call bind_kv_cache before forward")
        rt, prefix, t = self._rt, self._prefix, inputs.input_ids.shape[0]
        positions = inputs.positions
        hidden, residual, qkv = self.hidden[:t], self._residual[:t], self._qkv[:t]
        attn_out, gate_up, act = self._attn_out[:t], self._gate_up[:t], self._act[:t]
        stream = (hidden, residual, *self._partials)
        batches = [(positions, meta.slot_mapping, *meta.args) for meta in inputs.attn_metadata]
        batch_reads = [tuple(value for value in batch if isinstance(value, torch.Tensor)) for batch in batches]
        rt.run(prefix + "embed", residual, inputs.input_ids, reads=(inputs.input_ids,), writes=(residual,))
        for layer, (key_cache, value_cache) in enumerate(self._kv_caches):
            name = f"{prefix}layer.{layer}."
            reads = stream if layer else (residual,)
            rt.run(name + "before_attention", qkv, *stream, reads=reads, writes=(qkv, hidden, residual))
            group = self.layer_to_group[layer]
            rt.run(
                name + "attention", attn_out, qkv, key_cache, value_cache, *batches[group],
                reads=(qkv, key_cache, value_cache, *batch_reads[group]),
                writes=(qkv, key_cache, value_cache, attn_out),
            )  # fmt: skip
            rt.run(
                name + "after_attention", attn_out, gate_up, act, *stream,
                reads=(attn_out, residual), writes=(*stream, gate_up, act),
            )  # fmt: skip
        rt.run(prefix + "final_norm", *stream, reads=stream, writes=(hidden, residual))
        return hidden

    def compute_logits(self, logits_indices: torch.Tensor, n: int, *, in_order: bool = False) -> torch.Tensor:
        """Queue the logits of the last forward's rows ``logits_indices[:n]`` (int64, device); the view [n, V].
        ``in_order``: they are rows 0, 1, 2, ..., which spares a gather."""
        rt, (last, rows, out) = self._rt, self._logits_views
        if last != n:
            rows, out = self._logits_in[:n], self.logits[:n]
            self._logits_views = n, rows, out
        indices = logits_indices if logits_indices.shape[0] == n else logits_indices[:n]
        rt.run(
            self._prefix + "logits", out, rows, self.hidden, indices, in_order,
            reads=(self.hidden, indices), writes=(out, rows),
        )  # fmt: skip
        return out
