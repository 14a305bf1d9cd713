"""Seeded random weights, bit-equal on every machine: for shapes whose speed matters and whose text does not.

Numbers come from Philox bits by one exact step (uniform float32), so that no CPU's logarithm or vector width shows;
each tensor has its own stream, so its numbers do not depend on the other tensors.
"""

from __future__ import annotations

import zlib

import numpy as np
import torch

from mrv2lab.config import ModelConfig
from mrv2lab.model.names import expected_shapes


def random_weights(config: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Every tensor of the decoder in ``config.dtype``.

    Matrices [out, in] are uniform with standard deviation in^-0.5, so that activations keep their scale at any width
    (0.031 for 1,024, where the usual 0.02 is); norm weights lie in [0.9, 1.1), so that a forgotten one shows.
    """
    dtype: torch.dtype = getattr(torch, config.dtype)
    weights = {}
    for name, shape in expected_shapes(config).items():
        stream = np.random.Generator(np.random.Philox(key=[seed % 2**64, zlib.crc32(name.encode())]))
        values = stream.random(shape, dtype=np.float32)
        values -= np.float32(0.5)
        values *= np.float32((12.0 / shape[-1]) ** 0.5 if len(shape) == 2 else 0.2)
        if len(shape) == 1:
            values += np.float32(1.0)
        weights[name] = torch.from_numpy(values).to(dtype)
    return weights
