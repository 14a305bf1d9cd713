"""The whole sampler for one logits row, plainly, in float64 NumPy: one small function a stage, in the stages' order.

Every stage takes a row float64[V] and returns a new one. Nothing here shares code or ideas with the kernels (noise
apart, which has its own tests), and nothing is fast. NaN counts as -inf from the start.

    row = process(logits, Row(params, prompt=[5, 6], outputs=[7]))      # everything in front of the choice
    token = choose(row, params.temperature, seed, position)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mrv2lab.ops.noise import noise_spec
from mrv2lab.sampling_params import SamplingParams

Float64 = np.ndarray[Any, np.dtype[np.float64]]
INF = float("inf")


@dataclass(frozen=True)
class Row:
    """Whose logits row it is. ``drafts`` are this step's drafts in front of the row (local positions 1..pos)."""

    params: SamplingParams
    prompt: Sequence[int] = ()
    outputs: Sequence[int] = ()
    drafts: Sequence[int] = ()
    stop_ids: Sequence[int] = ()
    """EOS (unless ignored) and the request's own."""
    mask: Any = None
    """int32[ceil(V / 32)], the grammar's row; None = anything."""
    processors: Sequence[Any] = field(default=())
    """Functions (generated ids, row float64[V]) -> row."""

    @property
    def generated(self) -> list[int]:
        """What the request has said when this row's token is chosen."""
        return [*self.outputs, *self.drafts]

    @property
    def position(self) -> int:
        """Of the input token that produced the row."""
        return len(self.prompt) + len(self.generated) - 1


def process(logits: Any, row: Row, until: str = "") -> Float64:
    """``logits`` [V] of any float type through every stage in front of the choice; ``until`` names the last one."""
    p = row.params
    stages: dict[str, Any] = {
        "clean": lambda x: clean(x),
        "grammar": lambda x: grammar(x, row.mask),
        "allowed": lambda x: allowed(x, p.allowed_token_ids),
        "bias": lambda x: bias(x, p.logit_bias),
        "min_tokens": lambda x: min_tokens(
            x, row.stop_ids, row.position, len(row.prompt) + p.min_tokens, p.structured_output is not None
        ),
        "penalties": lambda x: penalties(
            x, row.prompt, row.generated, p.repetition_penalty, p.frequency_penalty, p.presence_penalty
        ),
        "bad_words": lambda x: bad_words(x, row.generated, p.bad_words),
        "custom": lambda x: custom(x, row.generated, row.processors),
        "temperature": lambda x: temperature(x, p.temperature),
        "min_p": lambda x: min_p(x, p.min_p),
        "top_k": lambda x: top_k(x, p.top_k),
        "top_p": lambda x: top_p(x, p.top_p),
    }
    x = np.asarray(logits, np.float64)
    for name, stage in stages.items():
        x = stage(x)
        if name == until:
            break
    return x


# -- raw logits --------------------------------------------------------------------------------------------------------
def nan_count(x: Any) -> int:
    """How many logits are NaN."""
    return int(np.isnan(np.asarray(x, np.float64)).sum())


def clean(x: Any) -> Float64:
    """NaN is -inf."""
    x = np.asarray(x, np.float64)
    return np.where(np.isnan(x), -INF, x)


def allowed_by_mask(mask: Any, vocab: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """bool[V] from a grammar's row: bit 0 of a word is its lowest token."""
    return np.array([(int(mask[token // 32]) >> (token % 32)) & 1 == 1 for token in range(vocab)])


def grammar(x: Float64, mask: Any) -> Float64:
    """A token whose bit is 0 is -inf."""
    return x if mask is None else np.where(allowed_by_mask(mask, len(x)), x, -INF)


# -- what edits logits -------------------------------------------------------------------------------------------------
def allowed(x: Float64, ids: Sequence[int] | None) -> Float64:
    """Only these."""
    if ids is None:
        return x
    out = np.full_like(x, -INF)
    out[list(ids)] = x[list(ids)]
    return out


def bias(x: Float64, biases: Any) -> Float64:
    """Add each token's bias."""
    out = x.copy()
    for token, value in biases.items():
        out[token] += value
    return out


def min_tokens(x: Float64, stop_ids: Sequence[int], position: int, min_len: int, structured: bool = False) -> Float64:
    """No stop token while the token to choose is one of the first min_tokens. ``min_len`` = prompt + min_tokens. A
    structured row that would have nothing left keeps its stop tokens: its grammar allows only the end."""
    if position + 1 >= min_len:
        return x
    out = x.copy()
    out[list(stop_ids)] = -INF
    return x if structured and np.all(out == -INF) else out


def penalties(
    x: Float64, prompt: Sequence[int], generated: Sequence[int], repetition: float, frequency: float, presence: float
) -> Float64:
    """Repetition for what prompt or output holds; frequency and presence for what the output holds."""
    out = x.copy()
    for token in {*prompt, *generated}:
        if 0 <= token < len(x):
            out[token] = out[token] / repetition if out[token] > 0 else out[token] * repetition
    for token in set(generated):
        if 0 <= token < len(x):
            out[token] = out[token] - frequency * list(generated).count(token) - presence
    return out


def bad_words(x: Float64, generated: Sequence[int], words: Any) -> Float64:
    """The last token of a word is impossible where the output ends in the word's other tokens."""
    out = x.copy()
    for word in words:
        *head, last = word
        if not head or list(generated)[-len(head) :] == head:
            out[last] = -INF
    return out


def custom(x: Float64, generated: Sequence[int], processors: Sequence[Any]) -> Float64:
    """Each function in turn."""
    for function in processors:
        x = function(list(generated), x.copy())
    return x


# -- what shapes the law -----------------------------------------------------------------------------------------------
def temperature(x: Float64, t: float) -> Float64:
    """Greedy rows (0, or below 1e-5) stay as they are."""
    return x / t if t >= 1e-5 else x


def min_p(x: Float64, p: float) -> Float64:
    """Keep logits >= max + log(p)."""
    return x if p == 0 or np.all(x == -INF) else np.where(x >= x.max() + np.log(p), x, -INF)


def best_first(x: Float64) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Token ids by logit, greatest first, ties by id."""
    return np.argsort(-x, kind="stable")


def top_k(x: Float64, k: int) -> Float64:
    """Keep exactly the k greatest, ties at the cut to the lowest ids; rows with k finite logits or fewer stay."""
    if k == 0 or k >= len(x) or np.sum(x > -INF) <= k:
        return x
    out = np.full_like(x, -INF)
    kept = best_first(x)[:k]
    out[kept] = x[kept]
    return out


def top_p(x: Float64, p: float) -> Float64:
    """Keep the fewest of the most likely tokens whose probability reaches p; one at least."""
    if p >= 1 or np.all(x == -INF):
        return x
    order = best_first(x)
    kept = order[: int(np.sum(_mass_before(x, order) < p))]
    out = np.full_like(x, -INF)
    out[kept] = x[kept]
    return out


def _mass_before(x: Float64, order: Any) -> Float64:
    """The probability of everything in front of each token of ``order``."""
    return np.concatenate([[0.0], np.cumsum(softmax(x)[order])[:-1]])


def excused(x: Float64, p: float = 1.0, min_p_value: float = 0.0) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """bool[V]: tokens about which a float32 sampler may disagree. ``x`` is the row in front of the cut: tokens whose
    cumulative probability, with or without themselves, is within 1e-5 of p, or whose logit is within 1e-5 of the min-p
    threshold. Ties with such a token are excused too."""
    out = np.zeros(len(x), bool)
    if np.all(x == -INF):
        return out
    if p < 1:
        order = best_first(x)
        before = _mass_before(x, order)
        near = (np.abs(before - p) <= 1e-5) | (np.abs(before + softmax(x)[order] - p) <= 1e-5)
        out[order] |= near
        out |= np.isin(x, x[out])
    if min_p_value > 0:
        out |= np.abs(x - (x.max() + np.log(min_p_value))) <= 1e-5
    return out


# -- the choice and what is said about it ------------------------------------------------------------------------------
def softmax(x: Float64) -> Float64:
    """Probabilities."""
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def log_softmax(x: Float64) -> Float64:
    """Logarithms of the probabilities."""
    best = x.max()
    return x - (best + np.log(np.sum(np.exp(x - best))))


def choose(x: Float64, t: float, seed: int, position: int) -> int:
    """Greedy, ties to the lowest id; or the Gumbel maximum of a processed row."""
    return int(np.argmax(x if t < 1e-5 else x + noise_spec(seed, position, len(x)).astype(np.float64)))


def rank(x: Float64, token: int) -> int:
    """How many logits are at least the token's, itself counted."""
    return int(np.sum(x >= x[token]))


def top_logprobs(x: Float64, token: int, k: int) -> tuple[list[int], list[float]]:
    """Ids and log-probabilities: the token itself, then the k most likely (all for -1), ties to the lowest id."""
    ids = [token, *best_first(x)[: len(x) if k == -1 else k].tolist()]
    return ids, log_softmax(x)[ids].tolist()
