"""Names and shapes of a decoder's tensors: Hugging Face's names are the vocabulary, other formats map to them."""

from __future__ import annotations

from collections.abc import Mapping

from mrv2lab.config import ModelConfig
from mrv2lab.model.errors import CheckpointError, listed

EMBED = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"

GGUF_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
"""GGUF's name behind ``blk.N.`` -> Hugging Face's behind ``model.layers.N.``."""

GGUF_TOP = {"token_embd.weight": EMBED, "output_norm.weight": FINAL_NORM, "output.weight": LM_HEAD}


def layer_name(layer: int, part: str) -> str:
    """``model.layers.3.self_attn.q_proj.weight`` for 3 and ``self_attn.q_proj``."""
    return f"model.layers.{layer}.{part}.weight"


def from_gguf(name: str) -> str | None:
    """Hugging Face's name of a GGUF tensor, or None for one that no supported decoder has."""
    if name in GGUF_TOP:
        return GGUF_TOP[name]
    head, _, rest = name.partition(".")
    layer, _, part = rest.partition(".")
    if head == "blk" and layer.isdigit() and part in GGUF_LAYER:
        return f"model.layers.{int(layer)}.{GGUF_LAYER[part]}"
    return None


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the decoder with its shape; projections are [out, in]. A tied head is not a tensor of its own."""
    h, i, d = config.hidden_size, config.intermediate_size, config.head_dim
    per_layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (h,),
        "self_attn.q_proj": (config.q_size, h),
        "self_attn.k_proj": (config.kv_size, h),
        "self_attn.v_proj": (config.kv_size, h),
        "self_attn.o_proj": (h, config.q_size),
        "post_attention_layernorm": (h,),
        "mlp.gate_proj": (i, h),
        "mlp.up_proj": (i, h),
        "mlp.down_proj": (h, i),
    }
    if config.qk_norm:
        per_layer |= {"self_attn.q_norm": (d,), "self_attn.k_norm": (d,)}
    shapes: dict[str, tuple[int, ...]] = {EMBED: (config.vocab_size, h), FINAL_NORM: (h,)}
    for layer in range(config.num_hidden_layers):
        shapes |= {layer_name(layer, part): shape for part, shape in per_layer.items()}
    if not config.tie_word_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, h)
    return shapes


def ignored(name: str, config: ModelConfig) -> bool:
    """A stored tensor that carries nothing: a tied head's copy, the rotary table of old checkpoints."""
    return (name == LM_HEAD and config.tie_word_embeddings) or name.endswith("rotary_emb.inv_freq")


def check_shapes(found: Mapping[str, tuple[int, ...]], config: ModelConfig, source: str) -> None:
    """Raise one :class:`CheckpointError` that lists every missing, extra and misshaped tensor of ``source``."""
    expected = expected_shapes(config)
    missing = [name for name in expected if name not in found]
    extra = [name for name in found if name not in expected and not ignored(name, config)]
    wrong = [
        f"{name} is {list(found[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in found and tuple(found[name]) != shape
    ]
    problems = []
    if missing:
        problems.append(f"{len(missing)} missing: {listed(missing)}")
    if extra:
        problems.append(f"{len(extra)} unexpected: {listed(extra)}")
    if wrong:
        problems.append(f"{len(wrong)} misshaped: {listed(wrong)}")
    if problems:
        raise CheckpointError(
            f"{source}: the tensors do not fit the {config.architecture} of its configuration. "
            + "; ".join(problems)
            + ". Use a checkpoint and a configuration that belong together"
        )
