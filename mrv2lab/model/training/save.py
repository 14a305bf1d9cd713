"""Writes a student as an ordinary Hugging Face folder in one uncompressed tar, and a sample of the stories."""

from __future__ import annotations

import gzip
import json
import tarfile
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import LlamaForCausalLM

from .tokenizer import END, END_ID
from .train import MAX_POSITION


def save_tar(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """config.json, generation_config.json, model.safetensors (bf16), tokenizer.json, tokenizer_config.json in `out`."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model.generation_config.eos_token_id = model.generation_config.bos_token_id = END_ID
        model.generation_config.pad_token_id = END_ID
        torch.nn.Module.to(model, torch.bfloat16)
        model.save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        # transformers 5 nests rope_theta and renames torch_dtype; older readers want the flat names.
        config |= {"rope_theta": 10000.0, "torch_dtype": "bfloat16"}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        shipped = Tokenizer.from_str(tokenizer.to_str())
        # A document begins behind an END, so an encoded prompt does too.
        shipped.post_processor = TemplateProcessing(single=f"{END} $A", special_tokens=[(END, END_ID)])
        shipped.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(
            json.dumps(
                {
                    "tokenizer_class": "PreTrainedTokenizerFast",
                    "bos_token": END,
                    "eos_token": END,
                    "pad_token": END,
                    "clean_up_tokenization_spaces": False,
                    "model_max_length": MAX_POSITION,
                },
                indent=2,
            )
            + "\n"
        )
        with tarfile.open(out, "w") as tar:
            for path in sorted(folder.iterdir()):
                tar.add(path, arcname=path.name)
    print(f"[save] {out.name}: {out.stat().st_size / 1e6:.2f} MB", flush=True)


def save_stories(documents: list[str], out: Path, most_bytes: int) -> int:
    """Gzips the first documents, a JSON string a line, while `out` stays under about `most_bytes`; returns how many."""
    count = 0
    with out.open("wb") as raw, gzip.open(raw, "wt", encoding="ascii", compresslevel=6) as file:
        for text in documents:
            file.write(json.dumps(text) + "\n")
            count += 1
            if count % 2000 == 0 and raw.tell() > most_bytes - 500_000:
                break
    return count
