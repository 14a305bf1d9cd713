"""The tables that a replay needs, and whether a header's have shapes that belong together."""

from __future__ import annotations

import numpy as np

from mrv2lab.recording.schema import Header, RecordingError

SHAPES = {
    "all_token_ids": "R L",
    "total_len": "R",
    "num_computed_tokens": "R",
    "draft_tokens": "R K",
    "last_sampled_tokens": "R",
    "next_prefill_tokens": "lookahead R",
    "block_table": "R B",
    "prompt_len": "R",
    "prefill_len": "R",
    "num_blocks": "G R",
    "temperature": "R",
    "seeds": "R",
    "input_ids": "T",
    "positions": "T",
    "seq_lens": "R",
    "logits_indices": "n",
    "idx_mapping": "R",
    "query_start_loc": "R+1",
    "slot_mappings": "G T",
    "input_block_table": "R B",
    "num_rejected": "R",
}
"""Sizes of each table by the GLOSSARY's letters; ``block_table`` and ``input_block_table`` once a KV-cache group."""


def num_groups(header: Header) -> int:
    """KV-cache groups of the recorded run."""
    return sum(name.startswith("block_table.") for name in header.tables)


def check_tables(header: Header) -> None:
    """Raises ``RecordingError`` where a table is missing, or of another shape or kind than the others ask for."""
    sizes: dict[str, int] = {"G": num_groups(header)}
    names = [(name, shape) for name, shape in SHAPES.items() if not name.endswith("block_table")]
    for g in range(max(sizes["G"], 1)):
        names += [(f"{name}.{g}", SHAPES[name].replace("B", f"B{g}")) for name in ("block_table", "input_block_table")]
    missing = [name for name, _ in names if name not in header.tables]
    if missing:
        raise RecordingError(f"this recording cannot be replayed: it has no table {', '.join(missing)}")
    for name, letters in names:
        shape, dtype = header.tables[name]
        expected = letters.split()
        fits = len(shape) == len(expected)
        for letter, size in zip(expected, shape, strict=False):
            letter, less = (letter[:-2], 1) if letter.endswith("+1") else (letter, 0)
            fits = fits and sizes.setdefault(letter, size - less) == size - less > 0
        if not fits or (np.dtype(dtype).kind == "f") != (name == "temperature"):
            raise RecordingError(
                f"this recording cannot be replayed: table {name} is {dtype}{list(shape)}, which does not go with the "
                f"other tables; expected [{', '.join(expected)}]"
            )
