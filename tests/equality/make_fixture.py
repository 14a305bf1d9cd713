"""The shipped model's logits by Hugging Face, in float32 on a CPU.

``python -m tests.equality.make_fixture`` writes them, so that a GPU is compared with numbers that no GPU has touched.
They belong to one ``model.safetensors``, whose sha256 they carry.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from mrv2lab.model.load import CHECKPOINTS, load_model
from tests.equality.models import hf_model

FIXTURE = Path(__file__).parent / "fixtures" / "tiny_logits.npz"
WEIGHTS = CHECKPOINTS / "tiny" / "model.safetensors"
ROWS = 8
"""Rows kept of each sequence: the first, the last, and between them at even distances."""

TEXTS = (
    "Once upon a time, there was a little fox named Mia.",
    "Question: What do bees make?\nAnswer: Bees fly from flower to flower, and at home they make honey.",
    "One day, Tom found an old boat by the lake. The boat had a hole in it, and the water came in. Tom was sad. His "
    "grandmother brought some wood, and together they closed the hole. The boat could swim again.",
    "The owl lived in a tall tree at the end of the village. Every night she sat on the highest branch and looked at "
    "the moon. One night the moon was gone, and it was very dark. The owl flew over the hill to look for it. Behind "
    'the hill she met a mouse with a lantern. "Do not worry," said the mouse. "It is only behind a cloud." They sat '
    "down and waited, and when the wind came, the moon was back. The owl smiled, and from that night on they were "
    "friends, and the mouse told her many stories about the moon and the stars.",
)


@dataclass(frozen=True)
class Fixture:
    """Token sequences, and the logits behind ``ROWS`` of the positions of each."""

    sha256: str
    """Of the weights."""
    versions: str
    sequences: list[list[int]]
    # [sequences, ROWS]
    positions: np.ndarray[tuple[int, int], np.dtype[np.int32]]
    # [sequences, ROWS, V] float32
    logits: torch.Tensor

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        """For every row the tokens it depends on, in the order of ``rows``."""
        where = zip(self.sequences, self.positions.tolist(), strict=True)
        return [tuple(sequence[: position + 1]) for sequence, positions in where for position in positions]

    @property
    def rows(self) -> torch.Tensor:
        """[sequences * ROWS, V] float32"""
        return self.logits.flatten(0, 1)


def sha256_of_weights() -> str:
    """Of the shipped model's weights as they are now."""
    return hashlib.sha256(WEIGHTS.read_bytes()).hexdigest()


@torch.inference_mode()
def make() -> Fixture:
    """From the weights as they are now."""
    import transformers

    tokenizer = load_model("tiny").tokenizer
    assert tokenizer is not None
    sequences = [tokenizer.encode(text) for text in TEXTS]
    positions = np.stack([np.linspace(0, len(sequence) - 1, ROWS).astype(np.int32) for sequence in sequences])
    assert all(len(set(row)) == ROWS for row in positions.tolist()), "a text is too short"
    model = hf_model("tiny")
    logits = [
        model(input_ids=torch.tensor([sequence]), use_cache=False).logits[0, row]
        for sequence, row in zip(sequences, positions, strict=True)
    ]
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
    return Fixture(sha256_of_weights(), versions, sequences, positions, torch.stack(logits).float())


def write(fixture: Fixture, path: Path = FIXTURE) -> None:
    """As compressed npz without pickles."""
    path.parent.mkdir(exist_ok=True)
    np.savez_compressed(
        path,
        sha256=np.array(fixture.sha256),
        versions=np.array(fixture.versions),
        lengths=np.array([len(sequence) for sequence in fixture.sequences], np.int32),
        tokens=np.concatenate(fixture.sequences).astype(np.int32),
        positions=fixture.positions,
        logits=fixture.logits.numpy(),
    )


def read(path: Path = FIXTURE) -> Fixture:
    """What ``write`` wrote."""
    with np.load(path, allow_pickle=False) as file:
        ends = np.cumsum(file["lengths"])[:-1]
        sequences = [part.tolist() for part in np.split(file["tokens"], ends)]
        logits = torch.from_numpy(file["logits"])
        return Fixture(str(file["sha256"]), str(file["versions"]), sequences, file["positions"], logits)


if __name__ == "__main__":
    torch.set_num_threads(1)
    made = make()
    write(made)
    print(f"{FIXTURE}: {len(made.rows)} rows of {made.rows.shape[1]}, {FIXTURE.stat().st_size:,} bytes")
