"""What is reported of the trained pair: held-out loss, agreement of draft and target, samples to read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM

from .tokenizer import END_ID, VOCAB_SIZE
from .train import logits_of, windows

PROMPTS = (
    "Once upon a time, there was a little fox named Mia.",
    "Once upon a time",
    "One rainy day, Ben found a map.",
    "Tom had a small boat. One day",
    "The old clock",
    "A bird sat",
    '"Where are you going?" asked Tess.',
    "The king had a broken clock.",
    "Question: Why do people like bread?\nAnswer:",
    "Question: What is the moon?\nAnswer:",
    "",
)


@dataclass(frozen=True)
class Agreement:
    """How often a draft's proposals would be accepted, on held-out text (not on the target's own)."""

    # mean over positions of sum_v min(p_target, p_draft): the acceptance rate of speculative sampling at T = 1
    overlap: float
    # share of positions where both have the same most likely token: the acceptance rate at T = 0
    greedy: float


def _starts(stream: Tensor, length: int, most: int) -> Tensor:
    """Starts of consecutive windows [num_windows]."""
    return torch.arange(0, len(stream) - length - 1, length, device=stream.device)[:most]


@torch.no_grad()
def loss(model: LlamaForCausalLM, stream: Tensor, length: int, most: int, batch: int = 32) -> float:
    """Mean nats per token over at most `most` consecutive windows of `stream` [num_tokens]."""
    total = count = 0.0
    for starts in _starts(stream, length, most).split(batch):
        x, y = windows(stream, starts, length)
        logits = logits_of(model, x).float().view(-1, VOCAB_SIZE)
        total += F.cross_entropy(logits, y.reshape(-1), reduction="sum").item()
        count += y.numel()
    return total / count


@torch.no_grad()
def agreement(target: LlamaForCausalLM, draft: LlamaForCausalLM, stream: Tensor, length: int, most: int) -> Agreement:
    """Compares the two on at most `most` windows of `stream` [num_tokens]."""
    overlap, greedy, windows_seen = 0.0, 0.0, 0
    for starts in _starts(stream, length, most).split(16):
        x, _ = windows(stream, starts, length)
        p, q = (logits_of(m, x).float().softmax(dim=-1) for m in (target, draft))
        overlap += torch.minimum(p, q).sum(dim=-1).mean().item() * len(starts)
        greedy += (p.argmax(dim=-1) == q.argmax(dim=-1)).float().mean().item() * len(starts)
        windows_seen += len(starts)
    return Agreement(overlap / windows_seen, greedy / windows_seen)


@torch.no_grad()
def samples(name: str, model: LlamaForCausalLM, tokenizer: Tokenizer, max_new: int) -> str:
    """Continuations of PROMPTS, greedy and at T = 0.7, to read. Every prompt stands behind one END."""
    device = next(model.parameters()).device
    encoded = [[END_ID, *tokenizer.encode(p, add_special_tokens=False).ids] for p in PROMPTS]
    longest = max(map(len, encoded))
    ids = torch.tensor([[END_ID] * (longest - len(e)) + e for e in encoded], device=device)
    mask = torch.tensor([[0] * (longest - len(e)) + [1] * len(e) for e in encoded], device=device)
    torch.manual_seed(0)
    parts = []
    drawn = {"do_sample": True, "temperature": 0.7, "top_k": 0}
    for title, how in (("greedy", {"do_sample": False}), ("T=0.7", drawn)):
        out = model.generate(ids, attention_mask=mask, max_new_tokens=max_new, pad_token_id=END_ID, **how)[:, longest:]
        for prompt, new in zip(PROMPTS, out.tolist(), strict=True):
            ended = END_ID in new
            text = tokenizer.decode(new[: new.index(END_ID)] if ended else new)
            parts.append(f"=== {name}, {title}: {prompt!r}\n{prompt}>>>{text}{'<end>' if ended else '...'}\n")
    return "\n".join(parts)
