"""From logits to tokens in V1's manner. Counterpart in vLLM: ``v1/sample/sampler.py`` and ``random_sample`` in
``v1/sample/ops/topk_topp_sampler.py``. What happens to the logits first: ``logits_stages``.

Greedy rows take the argmax. The others race: ``argmax(p / q)`` with q drawn from Exp(1) has the law of p, as Gumbel-max
has, and needs no synchronisation, which ``torch.multinomial`` does. A request whose user gave a seed draws its row of q
from a generator of its own, one launch and one turn of a Python loop each; all other rows share one generator, so that
what they draw depends on who else is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mrv2lab.runner_v1.logits_stages import LogitsStages, clean
from mrv2lab.runner_v1.persistent_batch import InputBatch
from mrv2lab.runtime.base import Runtime


class Sampler:
    """Chooses one token for each row of a batch. All arithmetic is queued; nothing waits."""

    def __init__(self, rt: Runtime) -> None:
        self.rt = rt
        self.shared = torch.Generator(device=rt.device)
        """Whose draws the rows without a seed take."""
        self.stages = LogitsStages(rt)
        self.keeps_shape = False
        """Whether logprobs are of the processed logits, so that these must be whole: divided by the temperature though
        the draw could do it, cut though no argmax cares."""
        self.processed: torch.Tensor | None = None
        """[r, V]: what the latest step's draw was made from; its raw logits where no stage had anything to do."""
        self.scaled = False
        """Whether these are divided by the temperatures."""
        self._seed = 0
        self._generators: dict[int, torch.Generator] = {}
        """By key, for queued work: only tensors and scalars can be queued. An entry goes in stream order, behind the
        last draw that was queued for it."""
        self.reset()
        rt.register("v1.sample.greedy", _greedy)
        rt.register("v1.sample.random", self._random)
        rt.register("v1.sample.forget", self._forget)

    def make_generator(self, seed: int) -> torch.Generator:
        """A generator for one request, on the device; it lives until :meth:`forget`."""
        generator = torch.Generator(device=self.rt.device)
        generator.manual_seed(seed)
        self._generators[id(generator)] = generator
        return generator

    def forget(self, generator: torch.Generator) -> None:
        """Its request is over; draws that are queued still get their numbers."""
        self.rt.run("v1.sample.forget", id(generator))

    def sample(
        self, sampled: torch.Tensor, logits: torch.Tensor, batch: InputBatch, discarded: Sequence[int] = ()
    ) -> None:
        """Write ``sampled`` int64[r, 1] from ``logits`` [r, V], which stay as they are. NaN counts as -inf.

        Rows in ``discarded`` sample for nobody, and their generators must not notice: V1 draws and winds a Philox
        generator back by 4; here such a row takes its numbers from the shared generator.
        """
        out, metadata = sampled.view(-1), batch.sampling_metadata
        scaled = False
        if metadata is not None:
            shape = not batch.all_greedy and metadata.shapes
            if self.keeps_shape and metadata.num_logprobs:
                shape = not batch.all_greedy or metadata.shapes
            processed = self.stages.apply(logits, batch, metadata, discarded, shape)
            if processed is not None:
                logits, scaled = processed, shape
        self.processed, self.scaled = logits, scaled
        if batch.all_greedy:
            self.rt.run("v1.sample.greedy", out, logits, reads=(logits,), writes=(out,))
            return
        generators = batch.generators
        if discarded and generators:
            skipped = set(discarded)
            generators = {row: one for row, one in generators.items() if row not in skipped}
        temperature = batch.temperature.gpu
        self.rt.run(
            "v1.sample.random",
            out,
            logits,
            temperature,
            tuple(generators),
            tuple(map(id, generators.values())),
            batch.all_random,
            scaled,
            reads=(logits, temperature),
            writes=(out,),
        )

    def _random(
        self,
        out: torch.Tensor,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        rows: tuple[int, ...],
        keys: tuple[int, ...],
        all_random: bool,
        scaled: bool,
    ) -> None:
        """Queued work: out int64[r] from logits [r, V] and temperature float32[R], 0 = greedy. ``scaled``: the logits
        are divided by it already."""
        logits = clean(logits)
        # From the UVA slot it may lie in, which torch's own operations cannot read in place.
        t = temperature[: len(logits)].to(logits.device, non_blocking=True)
        divisor = t if all_random else torch.where(t == 0, 1.0, t)
        probs = (logits if scaled else logits / divisor.unsqueeze(1)).softmax(dim=-1)
        q = torch.empty_like(probs)
        if len(rows) < len(q):
            q.exponential_(generator=self.shared)
        for row, key in zip(rows, keys, strict=True):
            q[row].exponential_(generator=self._generators[key])
        drawn = probs.div_(q).argmax(dim=-1)
        out.copy_(drawn if all_random else torch.where(t == 0, logits.argmax(dim=-1), drawn))

    def _forget(self, key: int) -> None:
        """Queued work: drop one generator."""
        del self._generators[key]

    def seed(self, seed: int) -> None:
        """What the shared generator starts from, now and after each :meth:`reset`; 0 at first. The queue must be
        empty."""
        self._seed = seed
        self.shared.manual_seed(seed)

    def reset(self) -> None:
        """Forget every request's generator and seed the shared one anew. The queue must be empty."""
        self._generators.clear()
        self.stages.reset()
        self.processed = None
        self.shared.manual_seed(self._seed)


def _greedy(out: torch.Tensor, logits: torch.Tensor) -> None:
    """Queued work: the argmax of each row, ties to the lowest id. float32 first, as everything in V1's sampler is."""
    torch.argmax(clean(logits), dim=-1, out=out)
