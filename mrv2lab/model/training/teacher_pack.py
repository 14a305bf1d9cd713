"""SmolLM2-135M-Instruct in one file small enough to travel: the GGUF's weights, packed tighter.

The GGUF (98 MB) holds linear layers as Q4_1: blocks of 32 weights, each `d * nibble + m`. The pack keeps
every nibble, stores `d` and `m` in a byte each, and keeps only the embedding rows of plain English tokens,
as small integers that zlib squeezes. That is about 63 MB. A smaller vocabulary also makes sampling cheaper. Tried and
dropped: the 8,000 most common tokens alone ("toys" is token 9173), and the embedding in 4 bits (+0.08 nats/token).

Pack:   python -m mrv2lab.model.training.teacher_pack SmolLM2-135M-Instruct.Q4_1.gguf smollm2.npz
(needs `gguf` and `transformers`; unpacking needs numpy and `tokenizers` alone)
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from .prompts import SYSTEM, Prompt, prompts

# Words, endings and plain punctuation; no markup, no digits but single ones, nothing outside ASCII.
PLAIN = re.compile(r"^Ġ?[A-Za-z]?[a-z]*$|^Ġ?['\"!?.,;:()\-]{1,3}Ċ{0,2}$|^Ċ+$|^'[a-z]+$|^\d$")
MOST_COMMON = 15_000  # token ids are in merge order, so a low id is a common token
EMBED_LEVELS = 47  # embedding values are integers in -47..47; zlib stores one in about 5.8 bits
HF_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


@dataclass(frozen=True)
class TeacherShape:
    """The Llama shape of the teacher."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    rope_theta: float
    rms_eps: float

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


@dataclass(frozen=True)
class TeacherFiles:
    """What a pack holds. Token ids come in two kinds: full (the tokenizer's) and row (the kept embedding's)."""

    shape: TeacherShape
    tokenizer: Tokenizer
    # [num_rows] row id -> full id
    full_id: np.ndarray
    # Hugging Face Llama name -> f32 array
    weights: dict[str, np.ndarray]

    def row(self, token: str) -> int:
        """The row id of a kept token. Raises ValueError for any other."""
        rows = np.flatnonzero(self.full_id == self.tokenizer.token_to_id(token))
        if len(rows) != 1:
            raise ValueError(f"{token!r} is not in the pack")
        return int(rows[0])


def chat(prompt: Prompt) -> str:
    """The teacher's chat template, up to and including the reply's opening."""
    return (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{prompt.instruction}<|im_end|>\n"
        f"<|im_start|>assistant\n{prompt.opening}"
    )


def pack(gguf_path: Path, out: Path) -> None:
    """Writes the pack of `gguf_path` to `out` (an .npz)."""
    import gguf
    from transformers import AutoTokenizer

    reader = gguf.GGUFReader(gguf_path)
    shape = _shape(reader)
    hf = AutoTokenizer.from_pretrained(str(gguf_path.parent), gguf_file=gguf_path.name)
    tokenizer: Tokenizer = hf.backend_tokenizer
    keep = _kept_tokens(tokenizer)
    arrays: dict[str, np.ndarray] = {
        "shape": _bytes(json.dumps(asdict(shape))),
        "tokenizer": _bytes(tokenizer.to_str()),
        "full_id": keep,
    }
    for tensor in reader.tensors:
        kind = tensor.tensor_type.name
        if tensor.name == "token_embd.weight":
            rows = gguf.dequantize(tensor.data, tensor.tensor_type)[keep]
            scale = np.abs(rows).max(axis=1, keepdims=True) / EMBED_LEVELS
            arrays["embed.q"], arrays["embed.scale"] = np.rint(rows / scale).astype(np.int8), scale.astype(np.float32)
        elif kind == "F32":
            arrays[f"{tensor.name}.f"] = np.array(tensor.data, dtype=np.float32)
        elif kind == "Q4_1":
            arrays |= {f"{tensor.name}.{k}": v for k, v in _squeeze(np.array(tensor.data)).items()}
        else:
            raise ValueError(f"{tensor.name} is {kind}; this pack knows F32, Q4_1 and the embedding alone")
    np.savez_compressed(out, **arrays)  # type: ignore[arg-type]


def unpack(path: Path) -> TeacherFiles:
    """Reads a pack; the weights come back in f32 under their Hugging Face names, q and k for rotate-half RoPE."""
    with np.load(path) as npz:
        a = {name: npz[name] for name in npz.files}
    shape = TeacherShape(**json.loads(a["shape"].tobytes()))
    tokenizer = Tokenizer.from_str(a["tokenizer"].tobytes().decode())
    weights = {
        "model.embed_tokens.weight": a["embed.q"].astype(np.float32) * a["embed.scale"],
        "model.norm.weight": _get(a, "output_norm.weight"),
    }
    for layer in range(shape.layers):
        for short, hf in HF_NAMES.items():
            name = f"blk.{layer}.{short}.weight"
            w = _get(a, name)
            if short in ("attn_q", "attn_k"):
                w = _to_rotate_half(w, shape.heads if short == "attn_q" else shape.kv_heads)
            weights[f"model.layers.{layer}.{hf}.weight"] = w
    return TeacherFiles(shape, tokenizer, a["full_id"], weights)


def _get(arrays: dict[str, np.ndarray], name: str) -> np.ndarray:
    """One layer weight or norm in f32."""
    if f"{name}.f" in arrays:
        return arrays[f"{name}.f"]
    return _unsqueeze({part: arrays[f"{name}.{part}"] for part in ("q", "d", "m", "range")})


def _bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), dtype=np.uint8)


def _shape(reader: Any) -> TeacherShape:
    def field(key: str) -> Any:
        return reader.fields[f"llama.{key}"].contents()

    return TeacherShape(
        layers=field("block_count"),
        hidden=field("embedding_length"),
        heads=field("attention.head_count"),
        kv_heads=field("attention.head_count_kv"),
        intermediate=field("feed_forward_length"),
        rope_theta=float(field("rope.freq_base")),
        rms_eps=float(field("attention.layer_norm_rms_epsilon")),
    )


def _kept_tokens(tokenizer: Tokenizer) -> np.ndarray:
    """[num_rows] full ids, ascending: the three specials, common plain tokens, and all that our prompts need."""
    vocab = tokenizer.get_vocab()
    keep = {vocab[t] for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")}
    keep |= {i for token, i in vocab.items() if i < MOST_COMMON and PLAIN.match(token)}
    for prompt in itertools.islice(prompts(seed=7), 60_000):
        keep |= set(tokenizer.encode(chat(prompt), add_special_tokens=False).ids)
    return np.array(sorted(keep), dtype=np.int32)


def _squeeze(raw: np.ndarray) -> dict[str, np.ndarray]:
    """Q4_1 rows [out, blocks * 20] uint8 -> the nibbles, and d and m in a byte each.

    d is stored on a log scale between the tensor's smallest and largest, m as a multiple of d in [-15, 0]:
    both errors stay far below the nibble's own rounding (0.29 d).
    """
    blocks = raw.reshape(raw.shape[0], -1, 20)
    scales = np.ascontiguousarray(blocks[..., :4]).view(np.float16).astype(np.float32)
    d, m = scales[..., 0], scales[..., 1]
    if not (d > 0).all():
        raise ValueError("a Q4_1 block has d <= 0")
    low, high = float(np.log(d.min())), float(np.log(d.max()))
    d8 = np.rint((np.log(d) - low) / max(high - low, 1e-9) * 255).astype(np.uint8)
    m8 = np.clip(np.rint(-m / _d_of(d8, low, high) * 17), 0, 255).astype(np.uint8)
    return {
        "q": np.ascontiguousarray(blocks[..., 4:]),
        "d": d8,
        "m": m8,
        "range": np.array([low, high], dtype=np.float32),
    }


def _d_of(d8: np.ndarray, low: float, high: float) -> np.ndarray:
    return np.exp(low + d8.astype(np.float32) / 255 * (high - low))


def _unsqueeze(t: dict[str, np.ndarray]) -> np.ndarray:
    """The inverse of `_squeeze`, in f32: [out, in]."""
    d = _d_of(t["d"], *t["range"])[..., None]
    nibbles = np.concatenate([t["q"] & 15, t["q"] >> 4], axis=-1).astype(np.float32)
    w = d * (nibbles - t["m"][..., None].astype(np.float32) / 17)
    return np.ascontiguousarray(w.reshape(w.shape[0], -1))


def _to_rotate_half(w: np.ndarray, heads: int) -> np.ndarray:
    """GGUF's llama keeps a rotary pair in neighbouring rows; Hugging Face keeps its halves half a head apart."""
    out, hidden = w.shape
    return np.ascontiguousarray(w.reshape(heads, out // heads // 2, 2, hidden).swapaxes(1, 2).reshape(out, hidden))


if __name__ == "__main__":
    pack(Path(sys.argv[1]), Path(sys.argv[2]))
