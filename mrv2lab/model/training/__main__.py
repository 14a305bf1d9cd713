"""Makes the shipped checkpoints in one go: stories, tokenizer, target, draft, report.

    python -m mrv2lab.model.training --teacher smollm2.npz --out OUT            one GPU, 7 minutes
    python -m mrv2lab.model.training --teacher smollm2.npz --out OUT --smoke    a CPU, tiny, to test the script

Writes into OUT: target.tar, draft.tar, metrics.json, samples.txt, stories.jsonl.gz. With --stories FILE.jsonl.gz no
story is written by the teacher; the file's are used. With both, the new ones are added to the file's (give another
--seed than the one that wrote the file).
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import os
import platform
import random
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from . import evaluate
from .prompts import prompts
from .save import save_stories, save_tar
from .teacher_pack import unpack
from .tokenizer import encode_stream, train_tokenizer
from .train import DRAFT, TARGET, Budget, new_model, with_retries
from .write_stories import write_stories

RESERVE = 30.0  # seconds kept for evaluation, samples and saving


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="mrv2lab.model.training")
    p.add_argument("--teacher", type=Path, help="the pack that teacher_pack writes")
    p.add_argument("--stories", type=Path, help="use these stories, with --teacher beside new ones")
    p.add_argument("--epochs", type=float, default=8, help="passes over the corpus, at most: more overfit")
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--limit", type=float, default=420, help="seconds for everything")
    p.add_argument("--write-seconds", type=float, default=150)
    p.add_argument("--draft-seconds", type=float, default=50)
    p.add_argument("--target-seconds", type=float, default=180, help="at most; less if the limit is near")
    p.add_argument("--batch", type=int, default=4096, help="sequences that the teacher writes at once")
    p.add_argument("--max-new", type=int, default=300)
    p.add_argument("--train-batch", type=int, default=64, help="sequences of 1024 tokens in a training step")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--smoke", action="store_true", help="tiny sizes, CPU")
    return p.parse_args()


class Clock:
    """The overall time limit."""

    def __init__(self, limit: float) -> None:
        self.begin, self.limit = time.monotonic(), limit

    def spent(self) -> float:
        return time.monotonic() - self.begin

    def left(self) -> float:
        return self.limit - self.spent()

    def say(self, text: str) -> None:
        print(f"[{self.spent():6.1f}s] {text}", flush=True)


def get_documents(args: argparse.Namespace, device: torch.device, metrics: dict[str, Any]) -> list[str]:
    """The corpus, shuffled; written by the teacher, or read from --stories."""
    documents: list[str] = []
    if args.stories:
        with gzip.open(args.stories, "rt", encoding="ascii") as file:
            documents = [json.loads(line) for line in file]
        metrics["stories_from_file"] = len(documents)
    if args.teacher:
        begin = time.monotonic()
        corpus = write_stories(
            unpack(args.teacher),
            device,
            args.write_seconds,
            args.batch,
            args.max_new,
            args.seed,
            max_documents=40 if args.smoke else None,
        )
        documents = list(dict.fromkeys([*documents, *corpus.documents]))
        metrics["stories"] = {
            "replies": corpus.replies,
            "finished": corpus.finished,
            "kept": len(corpus.documents),
            "teacher_tokens": corpus.tokens_written,
            "seconds": time.monotonic() - begin,
        }
    if args.smoke:  # too few for the rest of the pipeline on a busy CPU: fill up
        documents += [p.instruction for p in itertools.islice(prompts(1), 300)]
    random.Random(args.seed).shuffle(documents)
    return documents


def main() -> None:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() and not args.smoke else "cpu")
    if args.smoke:
        args.batch, args.max_new, args.train_batch = 8, 96, 2
        args.write_seconds = args.target_seconds = args.draft_seconds = 60
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.enable_cudnn_sdp(False)  # it would plan anew for every length of the teacher's cache
    clock = Clock(args.limit)
    metrics: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version(), "device": str(device)}
    if device.type == "cuda":
        metrics["device"] = torch.cuda.get_device_name()
    clock.say(f"device {metrics['device']}, torch {torch.__version__}")

    def write_metrics() -> None:
        (args.out / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")

    documents = get_documents(args, device, metrics)
    clock.say(f"{len(documents)} documents, {sum(map(len, documents)) / 1e6:.1f} M characters")
    save_stories(documents, args.out / "stories.jsonl.gz", 12_000_000)
    write_metrics()

    held_out = max(min(len(documents) // 50, 2500), 2)
    tokenizer = train_tokenizer(documents[held_out:])
    clock.say("tokenizer trained")
    streams = [
        torch.from_numpy(encode_stream(tokenizer, part)).to(device, torch.int32)
        for part in (documents[held_out:], documents[:held_out])
    ]
    train_stream, val_stream = streams
    metrics["tokens"] = {"train": len(train_stream), "val": len(val_stream), "val_documents": held_out}
    clock.say(f"{len(train_stream) / 1e6:.2f} M training tokens, {len(val_stream) / 1e6:.3f} M held out")
    seq_len, steps = (64, 6) if args.smoke else (1024, int(args.epochs * len(train_stream) / 1024 / args.train_batch))

    def finish(name: str, model: LlamaForCausalLM, run: Any) -> None:
        metrics[name] = asdict(run)
        metrics[name]["val_loss"] = evaluate.loss(model, val_stream, seq_len, most=512)
        save_tar(model, tokenizer, args.out / f"{name}.tar")  # from here on the weights are bf16
        metrics[name]["val_loss_bf16"] = evaluate.loss(model, val_stream, seq_len, most=512)
        write_metrics()
        clock.say(f"{name}: {metrics[name]}")
        text = evaluate.samples(name, model, tokenizer, 24 if args.smoke else 220)
        with (args.out / "samples.txt").open("a") as file:
            file.write(text + "\n")

    (args.out / "samples.txt").unlink(missing_ok=True)
    seconds = min(args.target_seconds, clock.left() - args.draft_seconds - RESERVE)
    budget = Budget(max(seconds, 20), args.train_batch, seq_len, steps)
    target, run = with_retries(
        "target", lambda: new_model(TARGET, device, args.seed), train_stream, TARGET.peak_lr, budget
    )
    finish("target", target, run)
    seconds = min(args.draft_seconds, clock.left() - RESERVE / 2)
    budget = Budget(max(seconds, 15), args.train_batch, seq_len, steps)
    draft, run = with_retries(
        "draft", lambda: new_model(DRAFT, device, args.seed), train_stream, DRAFT.peak_lr, budget, teacher=target
    )
    finish("draft", draft, run)
    metrics["agreement"] = asdict(evaluate.agreement(target, draft, val_stream, seq_len, most=128))
    metrics["seconds"] = clock.spent()
    write_metrics()
    clock.say(json.dumps(metrics))


if __name__ == "__main__":
    main()
