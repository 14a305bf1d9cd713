"""Makes the shipped checkpoints in one go: stories, tokenizer, target, draft, report.

    python -m mrv2lab.model.training --teacher smollm2.npz --out OUT            one GPU, 7 minutes
    python -m mrv2lab.model.training --stories FILE.jsonl.gz --grammar 50000 --out OUT       4 minutes
    python -m mrv2lab.model.training --teacher smollm2.npz --out OUT --smoke    a CPU, tiny, to test the script

Writes into OUT: target.tar, draft.tar, metrics.json, samples.txt, and with --teacher stories.jsonl.gz. --stories
FILE.jsonl.gz, as often as wanted, takes the teacher's stories from files; with --teacher the new ones are added (give
another --seed than the one that wrote the files). --grammar N adds N documents of the project's own grammar. The
held-out losses are reported for each part: the grammar's is near the entropy of its choices, the teacher's is not.
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

from . import evaluate, grammar
from .clean import distinct
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
    p.add_argument("--stories", type=Path, action="append", default=[], help="use these too; may be given again")
    p.add_argument("--grammar", type=int, default=0, help="documents of the project's own grammar to add")
    p.add_argument(
        "--distinct", type=float, default=0.0, help="drop the teacher's text with a smaller share of new 4-grams"
    )
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
    """The teacher's text, shuffled; written now, or read from --stories."""
    documents: list[str] = []
    for path in args.stories:
        with gzip.open(path, "rt", encoding="ascii") as file:
            documents += [json.loads(line) for line in file]
    documents = list(dict.fromkeys(documents))
    metrics["stories_from_files"] = len(documents)
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
        save_stories(documents, args.out / "stories.jsonl.gz", 12_000_000)
    documents = [d for d in documents if distinct(d) >= args.distinct]
    metrics["stories_used"] = len(documents)
    if args.smoke:  # too few for the rest of the pipeline on a busy CPU: fill up
        documents += [p.instruction for p in itertools.islice(prompts(1), 300)]
    random.Random(args.seed).shuffle(documents)
    return documents


def grammar_documents(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """The grammar's stories, all different, and its facts, which repeat and are all trained on."""
    both = list(itertools.islice(grammar.documents(args.seed), args.grammar))
    facts = [d for d in both if d.startswith("Question: ")]
    return list(dict.fromkeys(d for d in both if not d.startswith("Question: "))), facts


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
    ours, facts = grammar_documents(args)
    if ours:
        answered = {f.partition("\n")[0] for f in facts}
        documents = [d for d in documents if d.partition("\n")[0] not in answered]
        metrics["stories_used"] = len(documents)
        metrics["grammar"] = {"stories": len(ours), "facts": len(facts), **asdict(grammar.variety(ours))}
        clock.say(f"grammar: {metrics['grammar']}")
    parts = {name: part for name, part in (("teacher", documents), ("grammar", ours)) if part}
    write_metrics()

    held_out, train_documents = {}, facts
    for name, part in parts.items():
        count = max(min(len(part) // 50, 2500), 2)
        held_out[name] = part[:count]
        train_documents += part[count:]
    random.Random(args.seed).shuffle(train_documents)
    tokenizer = train_tokenizer(train_documents)
    clock.say("tokenizer trained")
    train_stream, *val = (
        torch.from_numpy(encode_stream(tokenizer, part)).to(device, torch.int32)
        for part in (train_documents, *held_out.values())
    )
    val_streams = dict(zip(held_out, val, strict=True))
    metrics["tokens"] = {"train": len(train_stream), "val": {n: len(s) for n, s in val_streams.items()}}
    metrics["held_out_documents"] = {name: len(part) for name, part in held_out.items()}
    clock.say(f"tokens: {metrics['tokens']}")
    seq_len, steps = (64, 6) if args.smoke else (1024, int(args.epochs * len(train_stream) / 1024 / args.train_batch))

    def finish(name: str, model: LlamaForCausalLM, run: Any) -> None:
        metrics[name] = asdict(run)
        metrics[name]["val_loss"] = {n: evaluate.loss(model, s, seq_len, most=512) for n, s in val_streams.items()}
        save_tar(model, tokenizer, args.out / f"{name}.tar")  # from here on the weights are bf16
        metrics[name]["val_loss_bf16"] = {n: evaluate.loss(model, s, seq_len, most=512) for n, s in val_streams.items()}
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
    metrics["agreement"] = {
        n: asdict(evaluate.agreement(target, draft, s, seq_len, most=128)) for n, s in val_streams.items()
    }
    metrics["seconds"] = clock.spent()
    write_metrics()
    clock.say(json.dumps(metrics))


if __name__ == "__main__":
    main()
