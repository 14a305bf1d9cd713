"""Training one small Llama on the packed stories, for a given number of seconds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from .tokenizer import END_ID, VOCAB_SIZE


@dataclass(frozen=True)
class Shape:
    """The shape of a student, and how it is trained."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    peak_lr: float


TARGET = Shape(hidden=256, layers=5, heads=8, kv_heads=4, intermediate=704, peak_lr=2e-3)
DRAFT = Shape(hidden=128, layers=2, heads=4, kv_heads=2, intermediate=352, peak_lr=4e-3)
MAX_POSITION = 1024
MAX_ATTEMPTS = 4
WEIGHT_DECAY = 0.3
"""Higher than usual: the corpus is passed over several times."""


@dataclass(frozen=True)
class Budget:
    """When training stops and how large its steps are."""

    seconds: float
    batch: int
    # Tokens in one sequence; MAX_POSITION, so that every position that the config promises has been trained.
    seq_len: int = MAX_POSITION
    max_steps: int | None = None


@dataclass(frozen=True)
class Run:
    """What a training run reports."""

    params: int
    steps: int
    tokens: int
    seconds: float
    train_loss: float


def new_model(shape: Shape, device: torch.device, seed: int) -> LlamaForCausalLM:
    """A randomly initialised student in f32."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.hidden // shape.heads,
        max_position_embeddings=MAX_POSITION,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=END_ID,
        eos_token_id=END_ID,
        initializer_range=0.02,
    )
    model: Any = LlamaForCausalLM(config)
    model.to(device)
    for layer in model.model.layers:  # the two that write to the residual stream start smaller, as in GPT-2
        for out in (layer.self_attn.o_proj, layer.mlp.down_proj):
            out.weight.data /= math.sqrt(2 * shape.layers)
    student: LlamaForCausalLM = model
    return student


def logits_of(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """ids [batch, T] -> logits [batch, T, vocab], in bf16 under autocast on a GPU."""
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.device.type == "cuda"):
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


def windows(stream: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Inputs and next tokens, each [len(starts), length] int64, of the stream [num_tokens] from each start."""
    at = starts[:, None] + torch.arange(length + 1, device=stream.device)
    both = stream[at].long()
    return both[:, :-1], both[:, 1:]


def train(
    name: str,
    model: LlamaForCausalLM,
    stream: Tensor,
    peak_lr: float,
    budget: Budget,
    teacher: LlamaForCausalLM | None = None,
) -> Run:
    """AdamW on windows of `stream` [num_tokens], half of which begin with a document.

    The cosine follows the share of the time that is spent.
    With a teacher the loss is half cross-entropy, half KL(teacher || model).
    Raises FloatingPointError when the loss is not finite any more.
    """
    device = stream.device
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}],
        lr=peak_lr,
        betas=(0.9, 0.95),
        fused=device.type == "cuda",
    )
    generator = torch.Generator(device=device).manual_seed(1)
    last = len(stream) - budget.seq_len - 1
    begins = (stream[:last] == END_ID).nonzero().flatten()  # [num_documents], about
    model.train()
    begin = time.monotonic()
    step = 0
    while True:
        spent = (time.monotonic() - begin) / budget.seconds
        if budget.max_steps is not None:
            spent = max(spent, step / budget.max_steps)
        if spent >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = peak_lr * _schedule(spent)
        starts = torch.randint(last, (budget.batch,), device=device, generator=generator)
        aligned = starts[: budget.batch // 2]  # a prompt begins at position 0 behind an END: so does half of a batch
        starts[: budget.batch // 2] = begins[aligned % len(begins)]
        x, y = windows(stream, starts, budget.seq_len)
        logits = logits_of(model, x).float().view(-1, VOCAB_SIZE)
        loss = ce = F.cross_entropy(logits, y.reshape(-1))
        if teacher is not None:
            with torch.no_grad():
                p = logits_of(teacher, x).float().view(-1, VOCAB_SIZE).log_softmax(dim=-1)
            kl = F.kl_div(logits.log_softmax(dim=-1), p, log_target=True, reduction="batchmean")
            loss = 0.5 * ce + 0.5 * kl
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 10 == 0:  # waits for the GPU, which keeps the clock that steers the schedule honest
            loss_now = ce.item()
            if not math.isfinite(loss_now):
                raise FloatingPointError(f"{name}: loss is {loss_now} at step {step}, peak_lr {peak_lr}")
        if step % 250 == 0 or step in (1, 10, 50):
            _report(name, step, step * x.numel(), time.monotonic() - begin, ce.item(), peak_lr * _schedule(spent))
    train_loss = ce.item()
    seconds = time.monotonic() - begin
    model.train(False)
    params = sum(p.numel() for p in model.parameters())
    return Run(params, step, step * budget.batch * budget.seq_len, seconds, train_loss)


def _schedule(spent: float) -> float:
    """Linear warm-up over 2% of the time, then a cosine to 2% of the peak."""
    if spent < 0.02:
        return max(spent, 0.0005) / 0.02
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (spent - 0.02) / 0.98))


def _report(name: str, step: int, tokens: int, seconds: float, loss: float, lr: float) -> None:
    speed = f"{tokens / 1e6:.1f} M tokens, {tokens / seconds:,.0f} tok/s"
    print(f"[{name}] {seconds:6.1f}s step {step} loss {loss:.4f} lr {lr:.2e} {speed}", flush=True)


def with_retries(
    name: str,
    make: Callable[[], LlamaForCausalLM],
    stream: Tensor,
    peak_lr: float,
    budget: Budget,
    teacher: LlamaForCausalLM | None = None,
) -> tuple[LlamaForCausalLM, Run]:
    """Trains a new model; starts over at a third of the rate if it diverged, with half the batch if memory ran out."""
    begin = time.monotonic()
    batch = budget.batch
    for _ in range(MAX_ATTEMPTS):
        left = max(budget.seconds - (time.monotonic() - begin), 5.0)
        model = make()
        try:
            run = train(name, model, stream, peak_lr, Budget(left, batch, budget.seq_len, budget.max_steps), teacher)
            return model, run
        except FloatingPointError as error:
            print(f"[{name}] {error}: starting over at a third of the rate", flush=True)
            peak_lr /= 3
        except torch.OutOfMemoryError:
            print(f"[{name}] out of GPU memory at batch {batch}: halving it", flush=True)
            batch //= 2
        del model
        if stream.device.type == "cuda":
            torch.cuda.empty_cache()
    raise RuntimeError(f"{name}: gave up after {MAX_ATTEMPTS} attempts")
