"""What the user reads of a steady batch (``steady.py``): tokens go to its account until somebody looks."""

from __future__ import annotations

from collections.abc import Iterable

from mrv2lab.engine.account import LOCK, Account, Tokens
from mrv2lab.engine.outputs import RequestOutput


class SteadyOutputs(Account[RequestOutput]):
    """The outputs of one list of requests, each of which gets one token a step and nothing else.

    ``outputs`` and the steps in front of which they were submitted, ``starts``, in the order of the requests.
    """

    __slots__ = ("_num_steps", "_starts", "_step")

    def __init__(self, outputs: list[RequestOutput], starts: list[int]) -> None:
        super().__init__(outputs)
        self._starts = starts
        self._num_steps = self._step = 0

    def step(self, tokens: Tokens, step: int) -> list[RequestOutput]:
        """A token for each, int64[outputs], in order."""
        outputs = self.members
        if self.is_open_for_step():
            with LOCK:
                self.begin_change()
                self._step = step
                self.add(tokens)
            return outputs.copy()
        for output, start, token in zip(outputs, self._starts, tokens.tolist(), strict=True):
            output.new_token_ids = [token]
            output.token_ids.append(token)
            output.steps = step - start
        self._num_steps += 1
        self.open(self._num_steps)
        return outputs.copy()

    def take_away(self, indices: Iterable[int]) -> None:
        """See :meth:`Account.take_away`."""
        give_back, now = self._give_back, self.num_columns
        for i in indices:
            output = self.members[i]
            ids = output.token_ids
            output.fall_behind(give_back, output, i, ids, len(ids), output.new_token_ids, output.steps, now)
            del output.token_ids, output.new_token_ids, output.steps

    def _give_back(
        self,
        output: RequestOutput,
        i: int,
        token_ids: list[int],
        length: int,
        latest: list[int],
        steps: int,
        columns: int,
    ) -> None:
        new = self.tokens_since(i, columns)
        if new:
            token_ids[length:] = new
            latest, steps = new[-1:], self._step - self._starts[i]
        output.token_ids, output.new_token_ids, output.steps = token_ids, latest, steps
