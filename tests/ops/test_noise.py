"""The counter-based noise: frozen values, equality of the three backends, laws of the bits, both tails, mutants."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from mrv2lab.ops import noise
from mrv2lab.ops.noise import noise_probe
from tests.ops.backends import BACKENDS, Apply, caught, implementation, mutant, poisoned

# Hash version 1. (seed, position): bits and noise of tokens 0, 1, 2 and 151935. A change here is a new version.
TOKENS = [0, 1, 2, 151_935]
GOLDEN = {
    (0, 0): (
        [0x598D1BA6, 0xA017CD4F, 0xE0121AAB, 0x46AC379F],
        ["0x1.af87a6p-1", "0x1.2cf6d6p-6", "-0x1.77611ep-1", "0x1.214374p+0"],
    ),
    (7, 41): (
        [0xABE0E20F, 0x1293F2E8, 0xC19C8CD9, 0x3F6F769E],
        ["-0x1.b6333p-4", "0x1.4afa8ap+1", "-0x1.6123d4p-2", "0x1.41939cp+0"],
    ),
    (-5, 2**30 + 12): (
        [0x6A601A21, 0xCEC28581, 0x1CD1BDD5, 0x6C178081],
        ["0x1.3e4b44p-1", "-0x1.ffd7bcp-2", "0x1.100058p+1", "0x1.33692cp-1"],
    ),
    (2**40 + 7, 2**31 + 3): (
        [0x348B0A20, 0xD4116A25, 0x221BD6AF, 0xB2C3A5C8],
        ["0x1.788b8ep+0", "-0x1.222d78p-1", "0x1.f1ea3cp+0", "-0x1.72845p-3"],
    ),
}


def probe(apply: Apply, seeds, positions, vocab: int):
    """uint32 bits, float32 uniforms and noise, each [n, V]."""
    n = len(seeds)
    bits, uniform, g = poisoned(n, vocab), poisoned(n, vocab, dtype=torch.float32), torch.full((n, vocab), float("nan"))
    apply(bits, uniform, g, torch.as_tensor(seeds), torch.as_tensor(positions))
    return bits.numpy().view(np.uint32), uniform.numpy(), g.numpy()


def check_golden(apply: Apply, vocab: int = 151_936) -> None:
    seeds, positions = zip(*GOLDEN, strict=True)
    bits, _, g = probe(apply, seeds, positions, vocab)
    tokens = [token for token in TOKENS if token < vocab]
    for row, (want_bits, want_noise) in enumerate(GOLDEN.values()):
        assert bits[row, tokens].tolist() == want_bits[: len(tokens)]
        assert g[row, tokens].tolist() == [float.fromhex(x) for x in want_noise[: len(tokens)]]


def test_golden_values_of_version_1():
    assert noise.HASH_VERSION == 1
    check_golden(implementation(noise_probe, "spec"))


@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("vocab", [3, 1025])
def test_backends_agree_bit_for_bit(backend, vocab):
    check_golden(implementation(noise_probe, backend), vocab)
    seeds, positions = [0, -1, 2**62 + 5], [2**31 - 1, 2**31, 12]
    want = probe(implementation(noise_probe, "spec"), seeds, positions, vocab)
    for x, y in zip(probe(implementation(noise_probe, backend), seeds, positions, vocab), want, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
def test_gpu_agrees_bit_for_bit_over_a_vocabulary():
    check_golden(implementation(noise_probe, "triton"))
    seeds, positions = list(range(-16, 16)), list(range(0, 320, 10))
    want = probe(implementation(noise_probe, "spec"), seeds, positions, 151_936)
    for x, y in zip(probe(implementation(noise_probe, "triton"), seeds, positions, 151_936), want, strict=True):
        np.testing.assert_array_equal(x, y)


# -- uniforms and noise -----------------------------------------------------------------------------------------------
def test_both_tails():
    """mrv2.md #44 and A15."""
    u, v = noise.uniforms_spec(np.array([0, 2**32 - 1], np.uint32))
    assert u.tolist() == [2.0**-33, 1.0]
    assert v.tolist() == [1.0, 2.0**-33]
    g = noise.gumbel_spec(u, v)
    assert g == pytest.approx([22.8738, -3.1300], abs=1e-4)  # 24-bit uniforms stop at 17.3; finite at u = 1


def spread() -> np.ndarray:
    """uint32[~170k]: all over the range, log-spaced, and both ends."""
    even = np.arange(0, 2**32, 65_537, dtype=np.uint64)
    ends = np.arange(2**14, dtype=np.uint64)
    spaced = (2.0 ** np.linspace(0, 32, 50_000, endpoint=False)).astype(np.uint64)
    return np.concatenate([even, ends, 2**32 - 1 - ends, spaced, 2**32 - spaced]).astype(np.uint32)


def test_uniforms_are_rounded_once():
    r = spread()
    exact = (r.astype(np.float64) + 0.5) * 2.0**-32
    u, v = noise.uniforms_spec(r)
    assert np.array_equal(u, exact.astype(np.float32))
    assert np.array_equal(v, (1 - exact).astype(np.float32))
    assert np.array_equal(v, noise.uniforms_spec(~r)[0])


def test_noise_is_near_the_exact_logarithms():
    r = spread()
    exact = -np.log(-np.log1p(-(r.astype(np.float64) + 0.5) * 2.0**-32))
    error = np.abs(noise.gumbel_spec(*noise.uniforms_spec(r)) - exact)
    ulp = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
    assert (error / ulp)[np.abs(exact) >= 0.5].max() <= 4
    assert (error / ulp)[exact >= 8.5].max() <= 1.5
    assert error[np.abs(exact) < 0.5].max() <= 2.5e-7


# -- laws of the bits -------------------------------------------------------------------------------------------------
def chi_square_z(cells: np.ndarray, count: int) -> float:
    """How many standard deviations the chi-square of equally likely ``cells`` in 0..count-1 is above its mean."""
    seen = np.bincount(cells.reshape(-1), minlength=count)
    expected = seen.sum() / count
    return (((seen - expected) ** 2 / expected).sum() - (count - 1)) / np.sqrt(2 * (count - 1))


def neighbours(a: np.ndarray, b: np.ndarray) -> float:
    """The same for the pair (top 6 bits of a, top 6 bits of b)."""
    return chi_square_z((a >> 26).astype(np.int64) << 6 | (b >> 26).astype(np.int64), 4096)


def correlation_z(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Standard deviations of each row's correlation."""
    return 12 * ((a / 2**32 - 0.5) * (b / 2**32 - 0.5)).sum(axis=1) / np.sqrt(a.shape[1])


def check_laws(apply: Apply, vocab: int = 4096) -> None:
    """Seeds 0..15 at positions 0..15, as people number them. Limits at about 5 standard deviations."""
    seeds, positions = np.repeat(np.arange(16), 16), np.tile(np.arange(16), 16)
    bits, uniform, _ = probe(apply, seeds, positions, vocab)
    assert max(chi_square_z(row >> 24, 256) for row in bits) < 6  # across tokens, the worst of 256 rows
    assert max(chi_square_z(row & 255, 256) for row in bits) < 6
    assert max(chi_square_z(column >> 28, 16) for column in bits.T) < 8  # across seeds and positions, 4,096 tokens
    assert neighbours(bits[:, :-1], bits[:, 1:]) < 5  # tokens
    grid = bits.reshape(16, 16, vocab)
    for a, b in ((grid[:, :-1], grid[:, 1:]), (grid[:-1], grid[1:])):  # positions, seeds
        assert neighbours(a, b) < 5
        assert np.abs(correlation_z(a.reshape(-1, vocab), b.reshape(-1, vocab))).max() < 5
    assert (np.diff(np.sort(bits.reshape(-1))) == 0).sum() < 128 + 5 * 12  # 2^20 draws share 128 values on average
    assert uniform.min() < 2**-18  # 2^20 draws reach far into the winning tail ...
    assert (uniform.view(np.uint32)[uniform < 2**-6] & 0x1F).any()  # ... and keep 24 significant bits there


def test_laws_of_the_bits():
    check_laws(implementation(noise_probe, "spec"))


def test_every_bit_of_seed_position_and_token_counts():
    """Avalanche: flipping it flips each bit of the output in about half of 2,000 cases (5 sd: 0.056)."""
    made = np.random.default_rng(1)
    seed, position = made.integers(0, 1000, 2000), made.integers(0, 30_000, 2000)
    token = made.integers(0, 152_000, 2000).astype(np.uint32)

    def bits(seed, position, token):
        return noise.token_bits_spec(*noise.row_keys_spec(seed, position), token)

    base = bits(seed, position, token)
    flipped = [bits(seed ^ (1 << np.int64(i)), position, token) for i in range(64)]
    flipped += [bits(seed, position ^ (1 << np.int64(i)), token) for i in range(32)]
    flipped += [bits(seed, position, token ^ np.uint32(1 << i)) for i in range(18)]
    for i, other in enumerate(flipped):
        share = ((base ^ other)[:, None] >> np.arange(32, dtype=np.uint32) & 1).mean(axis=0)
        assert np.abs(share - 0.5).max() < 0.06, i


def test_keys_do_not_repeat():
    k0, k1 = noise.row_keys_spec(np.repeat(np.arange(300), 300), np.tile(np.arange(300), 300))
    assert len(np.unique(k0.astype(np.uint64) << np.uint64(32) | k1)) == 90_000
    for keys in (noise.row_keys_spec(7, np.arange(2**17)), noise.row_keys_spec(np.arange(2**17), 7)):
        assert len(np.unique(keys[0])) == 2**17  # one-to-one, so exact


def test_one_row_never_draws_the_same_bits_twice():
    k0, k1 = noise.row_keys_spec(3, 4)
    assert len(np.unique(noise.token_bits_spec(k0, k1, np.arange(2**18, dtype=np.uint32)))) == 2**18


# -- mutants ----------------------------------------------------------------------------------------------------------
MUTANTS = {
    "24-bit uniforms": (
        "    u = (bits.astype(np.float64) + 0.5) * 2.0**-32\n",
        "    u = ((bits >> 8).astype(np.float64) + 0.5) * 2.0**-24\n",
    ),
    "position ignored": ("pos = np.atleast_1d(np.asarray(position, np.int64))", "pos = np.atleast_1d(np.int64(5))"),
    "seed ignored": ("row_keys_spec(int(seeds[row]), ", "row_keys_spec(7, "),
    "position added to the seed": ("row_keys_spec(int(seeds[row]), int(positions[row]))",
                                   "row_keys_spec(int(seeds[row]) + int(positions[row]), 0)"),
    "the high word of the seed ignored": ("(seed >> 32).astype", "(seed & 0).astype"),
    "row number in the key": ("int(positions[row]))", "int(positions[row]) + row)"),
    "one round fewer": ("    x *= np.uint32(0x31848BAB)\n", ""),
    "cancellation in 1 - u": ("np.where(exponent == 0, -u, f)", "f"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_fail_the_golden_values(name, tmp_path):
    apply = implementation(mutant(noise_probe, *MUTANTS[name], tmp_path), "spec")
    assert caught(partial(check_golden, vocab=151_936), apply) or caught(check_winning_tail, apply)


@pytest.mark.parametrize("name", ["24-bit uniforms", "position ignored", "seed ignored", "position added to the seed"])
def test_mutants_fail_the_laws(name, tmp_path):
    assert caught(check_laws, implementation(mutant(noise_probe, *MUTANTS[name], tmp_path), "spec"))


def check_winning_tail(apply: Apply) -> None:
    """The best of 2^18 tokens within 2 ulp of the exact logarithm of its bits."""
    bits, _, g = probe(apply, [1, 2, 3], [4, 5, 6], 2**18)
    best = g.argmax(axis=1)
    r = bits[np.arange(3), best].astype(np.float64)
    np.testing.assert_allclose(g.max(axis=1), -np.log(-np.log1p(-(r + 0.5) * 2.0**-32)), rtol=0, atol=2e-6)


def test_winning_tail():
    check_winning_tail(implementation(noise_probe, "spec"))
