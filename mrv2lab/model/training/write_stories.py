"""SmolLM2 writes the corpus: batches of equally long prompts, until the time is over."""

from __future__ import annotations

import time
import traceback
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from .clean import document
from .prompts import Prompt, prompts
from .teacher import HFTeacher, Sampling, Teacher
from .teacher_pack import TeacherFiles, chat


@dataclass
class Corpus:
    """The documents kept so far, and how they came to be."""

    documents: list[str] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    replies: int = 0
    finished: int = 0
    tokens_written: int = 0

    def add(self, prompt: Prompt, reply: str, finished: bool) -> None:
        self.replies += 1
        self.finished += finished
        text = document(prompt, reply, finished)
        if text is None:
            return
        key = text.lower()[:160]
        if key not in self.seen:
            self.seen.add(key)
            self.documents.append(text)


def equal_length_batches(files: TeacherFiles, batch: int, seed: int) -> Iterator[tuple[list[Prompt], torch.Tensor]]:
    """Yields (prompts, row ids [batch, prompt_len]); the length that fills its batch first comes first."""
    row = np.full(files.tokenizer.get_vocab_size(), -1, dtype=np.int64)
    row[files.full_id] = np.arange(len(files.full_id))
    buckets: dict[int, list[tuple[Prompt, np.ndarray]]] = defaultdict(list)
    source = prompts(seed)
    while True:
        chunk = [next(source) for _ in range(4096)]
        encoded = files.tokenizer.encode_batch([chat(p) for p in chunk], add_special_tokens=False)
        for prompt, e in zip(chunk, encoded, strict=True):
            ids = row[e.ids]
            if (ids < 0).any():
                continue
            bucket = buckets[len(ids)]
            bucket.append((prompt, ids))
            if len(bucket) == batch:
                del buckets[len(ids)]
                yield [p for p, _ in bucket], torch.from_numpy(np.stack([i for _, i in bucket]))


def write_stories(
    files: TeacherFiles,
    device: torch.device,
    seconds: float,
    batch: int,
    max_new: int,
    seed: int,
    max_documents: int | None = None,
    sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
) -> Corpus:
    """Writes for `seconds`. Running out of memory halves the batch; any other failure goes on with transformers."""
    begin = time.monotonic()
    deadline = begin + seconds
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device=device).manual_seed(seed)
    teacher: Teacher | HFTeacher = Teacher(files, device, dtype)
    corpus = Corpus()
    batches = equal_length_batches(files, batch, seed)
    longest = 0.0
    while True:
        start = time.monotonic()
        # A batch cut off by the deadline still gives usable text, half a batch hardly does.
        if corpus.replies and start + 0.6 * longest > deadline:
            break
        if max_documents is not None and len(corpus.documents) >= max_documents:
            break
        asked, ids = next(batches)
        try:
            replies = teacher.generate(ids, max_new, sampling, generator, deadline)
        except torch.OutOfMemoryError:
            batch //= 2
            print(f"[stories] out of GPU memory: batch is now {batch}", flush=True)
            if batch < 16:
                raise
            torch.cuda.empty_cache()
            batches = equal_length_batches(files, batch, seed + batch)
            continue
        except Exception:
            if isinstance(teacher, HFTeacher):
                raise
            traceback.print_exc()
            print("[stories] the fast path failed: going on with transformers' generate", flush=True)
            teacher = HFTeacher(files, device, dtype)
            continue
        wrote = time.monotonic() - start
        texts = files.tokenizer.decode_batch([files.full_id[r].tolist() for r, _ in replies])
        for prompt, text, (_, finished) in zip(asked, texts, replies, strict=True):
            corpus.add(prompt, text, finished)
        new = sum(len(r) for r, _ in replies)
        corpus.tokens_written += new
        longest = max(longest, time.monotonic() - start)
        print(
            f"[stories] {time.monotonic() - begin:6.1f}s batch {len(asked)}x{ids.shape[1]}: {new / wrote:,.0f} tok/s "
            f"({time.monotonic() - start - wrote:.2f}s cleaning), finished {corpus.finished}/{corpus.replies}, "
            f"kept {len(corpus.documents)}, written {corpus.tokens_written / 1e6:.2f} M",
            flush=True,
        )
    return corpus
