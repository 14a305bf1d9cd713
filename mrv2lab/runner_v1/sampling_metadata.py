"""What the sampler of a step needs to know of the batch's rows, made anew whenever rows have changed.

Counterpart in vLLM: ``SamplingMetadata`` in ``v1/sample/metadata.py``, made by ``InputBatch._make_sampling_metadata``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mrv2lab.protocol import LogitsFunction
from mrv2lab.runner_v1.sampling_rows import ALLOWED, PENALTIES, MinTokens
from mrv2lab.runtime.base import Runtime
from mrv2lab.runtime.transfer import PinnedCopy

if TYPE_CHECKING:
    from mrv2lab.runner_v1.persistent_batch import InputBatch

Penalties = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """Of r rows; None and empty = no row uses it. The dictionaries are by row."""

    # [r, V] bool, True = not allowed
    allowed_token_ids_mask: torch.Tensor | None
    # [m] int64, [m] int64, [m] float32: row, token and bias of every biased token
    logit_bias: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None
    min_tokens: Mapping[int, MinTokens]
    # 3 x [r] float32: repetition, frequency, presence
    penalties: Penalties | None
    # [r, longest prompt] int64, padded with V; for the repetition penalty
    prompt_token_ids: torch.Tensor | None
    bad_words: Mapping[int, tuple[tuple[int, ...], ...]]
    processors: Mapping[int, tuple[tuple[int, LogitsFunction], ...]]
    # [r] float32
    min_p: torch.Tensor | None
    # [r] int32, V = all
    top_k: torch.Tensor | None
    # [r] float32, 1 = all
    top_p: torch.Tensor | None
    num_logprobs: Mapping[int, int]

    @property
    def reads_output_ids(self) -> bool:
        """Whether a stage needs the tokens generated so far, on the host: then none may be a placeholder."""
        return self.penalties is not None or bool(self.bad_words) or bool(self.processors)

    @property
    def shapes(self) -> bool:
        """Whether a row cuts the law's tail, behind the temperature."""
        return self.min_p is not None or self.top_k is not None or self.top_p is not None


class MetadataMaker:
    """Publishes the tables in use and makes the metadata of a batch. Index arrays, and the prompts of a batch with
    penalties, go through fresh pinned memory, whatever the transfer policy."""

    def __init__(self, rt: Runtime, vocab_size: int) -> None:
        fresh = PinnedCopy(rt)
        self._vocab_size = vocab_size
        self._bias_rows = fresh.upload("logit_bias.rows", 1, torch.int64)
        self._bias_ids = fresh.upload("logit_bias.ids", 1, torch.int64)
        self._bias_values = fresh.upload("logit_bias.values", 1, torch.float32)
        self._prompts = fresh.upload("prompt_token_ids", 1, torch.int64)

    def make(self, batch: InputBatch) -> SamplingMetadata | None:
        """Of the batch as it stands, dense and in order; None if no row asks for anything."""
        rows, count = batch.sampling, batch.num_reqs
        if not rows.used:
            return None
        rows.publish(count)

        def column(name: str) -> torch.Tensor | None:
            return rows.tables[name].gpu[:count] if rows.users[name] else None

        penalties = self._penalties(batch)
        return SamplingMetadata(
            allowed_token_ids_mask=column(ALLOWED),
            logit_bias=self._logit_bias(rows.logit_bias),
            min_tokens=rows.min_tokens,
            penalties=penalties,
            prompt_token_ids=None if penalties is None else self._prompt_token_ids(batch),
            bad_words=rows.bad_words,
            processors=rows.processors,
            min_p=column("min_p"),
            top_k=column("top_k"),
            top_p=column("top_p"),
            num_logprobs=rows.num_logprobs,
        )

    def _logit_bias(self, biases: Mapping[int, Mapping[int, float]]) -> Any:
        if not biases:
            return None
        found = [(row, token, value) for row, bias in biases.items() for token, value in bias.items()]
        at, ids, values = zip(*found, strict=True)
        return (
            self._bias_rows.send(np.array(at, np.int64)),
            self._bias_ids.send(np.array(ids, np.int64)),
            self._bias_values.send(np.array(values, np.float32)),
        )

    def _penalties(self, batch: InputBatch) -> Penalties | None:
        rows, count = batch.sampling, batch.num_reqs
        if not rows.users[PENALTIES[0]]:
            return None
        repetition, frequency, presence = (rows.tables[name].gpu[:count] for name in PENALTIES)
        return repetition, frequency, presence

    def _prompt_token_ids(self, batch: InputBatch) -> torch.Tensor:
        """[r, longest prompt]: every prompt of the batch, sent again when anybody comes, goes or moves."""
        count = batch.num_reqs
        lengths = batch.num_prompt_tokens[:count]
        longest = max(1, int(lengths.max()))
        padded = batch.token_ids_cpu[:count, :longest].astype(np.int64)
        padded[np.arange(longest) >= lengths[:, None]] = self._vocab_size
        return self._prompts.send(padded.reshape(-1)).view(count, longest)
