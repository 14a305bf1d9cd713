"""A cheap upper bound of the Gumbel noise, so that few tokens need its two logarithms.

The noise g = -log(-log1p(-u)) lies below -log(u), and -log2 of a positive float lies below the line through the powers
of two, 127 - bits / 2^23, with ``bits`` its representation as an integer (log2(1 + f) >= f in [0, 1]; the gap is at
most 0.086). So a token whose hash is y in front of its last xor (``noise.token_rounds``; that takes less than y / 2^14
off) has::

    g <= log(2) (159 - bits(float(y)) / 2^23) + SLACK

which costs two conversions and one multiply-add, where g costs about 50 operations. The bound is within 0.09 of g
where g > 3, which is where winners are. SLACK covers the xor and every rounding; the tests go through all of float(y).
No counterpart in vLLM, whose ``sample/gumbel.py`` computes two logarithms a token.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mrv2lab.ops._op import jit

tl: Any = None

SLOPE = 8.262958294867817e-08
"""log(2) / 2^23."""
TOP = 110.2120
"""159 log(2) + SLACK: the bound where the float's bits are 0."""
SLACK = 1e-3
RELATIVE = 2.0**-20
"""How far the roundings of logit / T + g may lift a score, as a share of |logit / T|: six of 2^-24 at most."""


def noise_bound_spec(y: Any) -> Any:
    """uint32 in front of the hash's last xor -> float64 bound of the noise."""
    bits = y.astype(np.float32).view(np.int32).astype(np.float32)
    return TOP - bits.astype(np.float64) * SLOPE


@jit
def falling_bits(y):
    """uint32[C] -> float32[C], the integer representation of float(y): the bound is TOP - SLOPE times it."""
    return y.to(tl.float32).to(tl.int32, bitcast=True).to(tl.float32)
