"""SmolLM2 as a batch writer: prefill, then a lock-step decode over a preallocated KV cache, in plain torch.

All prompts of a batch have the same length, so there is no padding and no attention mask. Sequences that
ended leave the batch once they are a quarter of it. This is a data pump, not the engine: read the
engine for how serving is done.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .teacher_pack import TeacherFiles, TeacherShape

FUNCTION_WORDS = 600  # full token ids below this are letters, punctuation and the most common words
CHECK_EVERY = 8  # decode steps between looks at how many sequences still run (each look waits for the GPU)


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 means greedy; else top-k, then top-p within it.

    `repeat_penalty` is subtracted from a content word's logit for each time the reply has used it, `repeat_cap`
    times at most: without it this teacher falls into loops ("She was very happy. She was very happy.").
    """

    temperature: float = 0.7
    top_k: int = 40
    top_p: float = 0.9
    repeat_penalty: float = 1.0
    repeat_cap: float = 3.0


@dataclass(frozen=True)
class Layer:
    """One decoder layer's weights."""

    # [hidden]
    attn_norm: Tensor
    # [(heads + 2 * kv_heads) * head_dim, hidden]
    qkv: Tensor
    # [hidden, heads * head_dim]
    o: Tensor
    # [hidden]
    mlp_norm: Tensor
    # [2 * intermediate, hidden]
    gate_up: Tensor
    # [hidden, intermediate]
    down: Tensor


class KVCache:
    """Keys and values of every layer for sequences in lock step."""

    def __init__(self, shape: TeacherShape, batch: int, max_len: int, dtype: torch.dtype, device: torch.device) -> None:
        # Rounded up, so that batches of other prompt lengths find their memory already there in the allocator.
        size = (batch, shape.kv_heads, -(-max_len // 128) * 128, shape.head_dim)
        # layers x [batch, kv_heads, max_len, head_dim]
        self.k = [torch.empty(size, dtype=dtype, device=device) for _ in range(shape.layers)]
        self.v = [torch.empty(size, dtype=dtype, device=device) for _ in range(shape.layers)]

    def keep(self, rows: Tensor) -> None:
        """Keeps the sequences `rows` [kept] alone, one layer at a time so that memory does not double."""
        for layers in (self.k, self.v):
            for i, old in enumerate(layers):
                layers[i] = old[rows]


class Teacher:
    """The packed SmolLM2 on one device. Token ids here are row ids of the kept vocabulary."""

    def __init__(self, files: TeacherFiles, device: torch.device, dtype: torch.dtype, max_len: int = 1024) -> None:
        self.shape = shape = files.shape
        self.device, self.dtype = device, dtype
        self.eos = files.row("<|im_end|>")
        banned = [files.row("<|endoftext|>"), files.row("<|im_start|>")]
        # [num_banned]
        self.banned = torch.tensor(banned, device=device)
        # [num_rows] 1 where a token is no function word or punctuation (those have low ids: merges come by frequency)
        self.content = (torch.from_numpy(files.full_id) >= FUNCTION_WORDS).to(device, torch.float16)

        def get(name: str) -> Tensor:
            return torch.from_numpy(files.weights[name]).to(device, dtype)

        # [num_rows, hidden], also the output head
        self.embed = get("model.embed_tokens.weight")
        self.norm = get("model.norm.weight")
        self.layers = []
        for i in range(shape.layers):
            at = f"model.layers.{i}."
            q, k, v = (get(f"{at}self_attn.{n}_proj.weight") for n in "qkv")
            gate, up = (get(f"{at}mlp.{n}_proj.weight") for n in ("gate", "up"))
            self.layers.append(
                Layer(
                    attn_norm=get(at + "input_layernorm.weight"),
                    qkv=torch.cat([q, k, v]),
                    o=get(at + "self_attn.o_proj.weight"),
                    mlp_norm=get(at + "post_attention_layernorm.weight"),
                    gate_up=torch.cat([gate, up]),
                    down=get(at + "mlp.down_proj.weight"),
                )
            )
        half = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        angles = torch.outer(torch.arange(max_len, dtype=torch.float32), shape.rope_theta**-half)
        angles = torch.cat([angles, angles], dim=-1)
        # [max_len, head_dim]
        self.cos = angles.cos().to(device, dtype)
        self.sin = angles.sin().to(device, dtype)

    def logits(self, ids: Tensor, start: int, cache: KVCache) -> Tensor:
        """ids [batch, T] at positions start.. -> f32 logits of the last [batch, num_rows]. T > 1 needs start == 0."""
        s, (batch, T) = self.shape, ids.shape
        assert T == 1 or start == 0, "a prefill starts at position 0"
        end = start + T
        cos, sin = self.cos[start:end], self.sin[start:end]
        group = s.heads // s.kv_heads
        x = F.embedding(ids, self.embed)
        for i, w in enumerate(self.layers):
            h = F.rms_norm(x, (s.hidden,), w.attn_norm, s.rms_eps)
            qkv = F.linear(h, w.qkv).view(batch, T, s.heads + 2 * s.kv_heads, s.head_dim).transpose(1, 2)
            qk = _rope(qkv[:, : s.heads + s.kv_heads], cos, sin)
            q, k, v = qk[:, : s.heads], qk[:, s.heads :], qkv[:, s.heads + s.kv_heads :]
            cache.k[i][:, :, start:end] = k
            cache.v[i][:, :, start:end] = v
            if T > 1:
                k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
                a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            else:  # the query heads of a group are rows of one small matrix: no copy of k and v
                q = q.reshape(batch, s.kv_heads, group, s.head_dim)
                a = F.scaled_dot_product_attention(q, cache.k[i][:, :, :end], cache.v[i][:, :, :end])
                a = a.reshape(batch, s.heads, 1, s.head_dim)
            x = x + F.linear(a.transpose(1, 2).reshape(batch, T, s.hidden), w.o)
            gate, up = F.linear(F.rms_norm(x, (s.hidden,), w.mlp_norm, s.rms_eps), w.gate_up).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, w.down)
        x = F.rms_norm(x[:, -1], (s.hidden,), self.norm, s.rms_eps)
        return F.linear(x, self.embed).float()

    @torch.inference_mode()
    def generate(
        self, ids: Tensor, max_new: int, sampling: Sampling, generator: torch.Generator, deadline: float = float("inf")
    ) -> list[tuple[list[int], bool]]:
        """Continues ids [batch, prompt_len]; returns each sequence's new tokens, and whether it ended by itself.

        The eos is not among the tokens. Stops early at `deadline` (time.monotonic()).
        """
        batch, prompt_len = ids.shape
        out = torch.full((batch, max_new), self.eos, dtype=torch.int32, device=self.device)
        ended = torch.zeros(batch, dtype=torch.bool, device=self.device)
        rows = torch.arange(batch, device=self.device)  # [running] which sequence each cache row is
        # [running, num_rows] how often each token was used
        used = torch.zeros(batch, len(self.embed), dtype=torch.float16, device=self.device)
        cache = KVCache(self.shape, batch, prompt_len + max_new, self.dtype, self.device)
        logits = self.logits(ids.to(self.device), 0, cache)
        for step in range(max_new):
            if sampling.repeat_penalty and sampling.temperature:
                logits -= sampling.repeat_penalty * used.clamp(max=sampling.repeat_cap) * self.content
            token = self._sample(logits, sampling, generator)
            used.scatter_add_(1, token.unsqueeze(1), torch.ones_like(token.unsqueeze(1), dtype=used.dtype))
            token = torch.where(ended[rows], self.eos, token)
            out[rows, step] = token.int()
            ended[rows] |= token == self.eos
            if step + 1 == max_new:
                break
            if step % CHECK_EVERY == CHECK_EVERY - 1:
                running = ~ended[rows]
                count = int(running.sum())
                if count == 0 or time.monotonic() > deadline:
                    break
                if count < 0.75 * len(rows):
                    cache.keep(running.nonzero().squeeze(1))
                    rows, token, used = rows[running], token[running], used[running]
            logits = self.logits(token.unsqueeze(1), prompt_len + step, cache)
        texts = out.cpu().numpy()
        lengths = [int((row != self.eos).sum()) for row in texts]
        return [(row[:n].tolist(), bool(e)) for row, n, e in zip(texts, lengths, ended.cpu().tolist(), strict=True)]

    def _sample(self, logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
        """logits [batch, num_rows] -> [batch]."""
        logits.index_fill_(1, self.banned, float("-inf"))
        if sampling.temperature == 0:
            return logits.argmax(dim=-1)
        top, index = torch.topk(logits / sampling.temperature, sampling.top_k, dim=-1)
        p = top.softmax(dim=-1)
        p = p.masked_fill(p.cumsum(dim=-1) - p > sampling.top_p, 0.0)
        pick = torch.multinomial(p, 1, generator=generator)
        return index.gather(1, pick).squeeze(1)


def _rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [batch, heads, T, head_dim], cos and sin [T, head_dim]."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-b, a], dim=-1) * sin


class HFTeacher:
    """The same weights under transformers' `generate`: slower, used when `Teacher` fails, and to check it."""

    def __init__(self, files: TeacherFiles, device: torch.device, dtype: torch.dtype) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        s = files.shape
        self.eos = files.row("<|im_end|>")
        self.banned = [[files.row("<|endoftext|>")], [files.row("<|im_start|>")]]
        config = LlamaConfig(
            vocab_size=len(files.full_id),
            hidden_size=s.hidden,
            intermediate_size=s.intermediate,
            num_hidden_layers=s.layers,
            num_attention_heads=s.heads,
            num_key_value_heads=s.kv_heads,
            rms_norm_eps=s.rms_eps,
            rope_parameters={"rope_type": "default", "rope_theta": s.rope_theta},
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=self.eos,
            pad_token_id=self.eos,
        )
        model: Any = LlamaForCausalLM(config)
        state = {name: torch.from_numpy(w) for name, w in files.weights.items()}
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
        model.load_state_dict(state)
        self.model = model.to(device, dtype).eval()
        self.device = device

    @torch.inference_mode()
    def generate(
        self, ids: Tensor, max_new: int, sampling: Sampling, generator: torch.Generator, deadline: float = float("inf")
    ) -> list[tuple[list[int], bool]]:
        """As `Teacher.generate` (the generator is not used: transformers draws from torch's global one)."""
        how: dict[str, Any] = {"do_sample": sampling.temperature > 0}
        if sampling.temperature:
            how |= {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
        left = deadline - time.monotonic()
        if left != float("inf"):
            how["max_time"] = max(left, 1.0)
        ids = ids.to(self.device)
        new = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new, bad_words_ids=self.banned, **how
        )[:, ids.shape[1] :].tolist()
        return [(row[: row.index(self.eos)], True) if self.eos in row else (row, False) for row in new]
