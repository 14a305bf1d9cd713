"""A persistent batch as plain lists and dictionaries, driven beside the real one by a script of operations."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from mrv2lab.runner_v1.cached_request import CachedRequestState
from mrv2lab.runner_v1.persistent_batch import InputBatch
from mrv2lab.runner_v1.reorder import reorder_batch
from mrv2lab.runner_v1.sampling_rows import ALLOWED, PENALTIES, MinTokens
from tests.runner_v1.batches import BLOCK_SIZES, MAX_LEN, MAX_REQS, make_batch, random_request

OPERATIONS = "nothing add add add back remove remove condense swap split mrv2 token block computed".split()


class Pair:
    """The real batch and what it should hold. Each operation is done to both and everything is compared."""

    def __init__(self) -> None:
        self.batch: InputBatch = make_batch()
        self.rows: list[str | None] = []
        self.live: dict[str, dict[str, Any]] = {}
        self.evicted: dict[str, CachedRequestState] = {}
        self.requests: dict[str, CachedRequestState] = {}
        self.added = self.removed = self.moved = self.swapped = self.bytes = 0
        self.row_bytes: dict[str, int] = {}
        """Of the tables of sampling parameters that somebody has needed so far."""

    def do(self, operation: str, seed: int) -> None:
        getattr(self, operation)(random.Random(seed))
        self.check()

    def nothing(self, draw: random.Random) -> None:
        """What a failing script's superfluous operations shrink to."""

    def add(self, draw: random.Random) -> None:
        self._add(random_request(f"r{len(self.requests)}", draw))

    def back(self, draw: random.Random) -> None:
        """A request that was removed comes back, as after an idle step."""
        if self.evicted and len(self.live) < MAX_REQS:
            self._add(self.evicted.pop(draw.choice(sorted(self.evicted))))

    def _add(self, request: CachedRequestState) -> None:
        if len(self.live) == MAX_REQS:
            return
        if None not in self.rows:
            self.rows.append(None)
        row = self.rows.index(None)
        assert self.batch.add_request(request) == row
        self.added += 1
        self.rows[row] = request.req_id
        self.requests[request.req_id] = request
        self.row_bytes |= {name: 50 if name == ALLOWED else 4 for name in tables_of(request)}
        self.live[request.req_id] = {
            "tokens": request.prompt_token_ids + request.output_token_ids,
            "prompt": len(request.prompt_token_ids),
            "computed": request.num_computed_tokens,
            "temperature": request.sampling.temperature,
            "generator": request.generator,
            "outputs": request.output_token_ids,
            "blocks": [list(ids) for ids in request.block_ids],
            "request": request,
        }

    def remove(self, draw: random.Random) -> None:
        if not self.live:
            assert self.batch.remove_request("nobody") is None
            return
        req_id = draw.choice(sorted(self.live))
        row = self.rows.index(req_id)
        assert self.batch.remove_request(req_id) == row
        self.removed += 1
        self.rows[row] = None
        gone, request = self.live.pop(req_id), self.requests[req_id]
        request.num_computed_tokens, request.block_ids = gone["computed"], gone["blocks"]
        self.evicted[req_id] = request

    def condense(self, draw: random.Random | None = None) -> None:
        self.batch.condense()
        while None in self.rows:
            last = self.rows.pop()
            if last is not None:
                self.rows[self.rows.index(None)] = last
                self.moved += 1
                self.bytes += self._bytes(last)

    def _bytes(self, req_id: str) -> int:
        """The row's int32 and float32: tokens, four scalars, block ids and their number; and sampling parameters."""
        one = self.live[req_id]
        return 4 * (len(one["tokens"]) + 4 + sum(len(ids) + 1 for ids in one["blocks"])) + sum(self.row_bytes.values())

    def swap(self, draw: random.Random) -> None:
        rows = [row for row, req_id in enumerate(self.rows) if req_id is not None]
        if rows:
            i, j = draw.choice(rows), draw.choice(rows)
            self.batch.swap_states(i, j)
            self.rows[i], self.rows[j] = self.rows[j], self.rows[i]

    def split(self, draw: random.Random) -> None:
        self._reorder(draw, draw.randint(1, 3))

    def mrv2(self, draw: random.Random) -> None:
        self._reorder(draw, "mrv2")

    def _reorder(self, draw: random.Random, demand: Any) -> None:
        """What order comes of it is test_reorder's; here every field must follow."""
        self.condense()
        ids = list(self.live)
        draw.shuffle(ids)
        reorder_batch(self.batch, demand, {req_id: draw.randint(1, 5) for req_id in ids}, {})
        assert sorted(self.batch.req_ids) == sorted(ids)
        self.rows = list(self.batch.req_ids)

    def token(self, draw: random.Random) -> None:
        """What bookkeeping does: a token behind the row's last."""
        req_id = self._somebody(draw)
        if req_id is not None and len(self.live[req_id]["tokens"]) < MAX_LEN:
            token, row = draw.choice([-1, draw.randrange(50)]), self.rows.index(req_id)
            self.batch.token_ids_cpu[row, self.batch.num_tokens_no_spec[row]] = token
            self.batch.num_tokens_no_spec[row] += 1
            self.requests[req_id].output_token_ids.append(token)
            self.live[req_id]["tokens"].append(token)

    def block(self, draw: random.Random) -> None:
        req_id = self._somebody(draw)
        if req_id is not None:
            blocks = self.live[req_id]["blocks"]
            new = [[draw.randint(1, 99)] * (len(b) * s < MAX_LEN) for b, s in zip(blocks, BLOCK_SIZES, strict=True)]
            self.batch.block_table.append_row(new, self.rows.index(req_id))
            for ids, more in zip(blocks, new, strict=True):
                ids.extend(more)

    def computed(self, draw: random.Random) -> None:
        req_id = self._somebody(draw)
        if req_id is not None:
            value = self.live[req_id]["computed"] = draw.randint(0, MAX_LEN)
            self.batch.num_computed_tokens.np[self.rows.index(req_id)] = value

    def _somebody(self, draw: random.Random) -> str | None:
        return draw.choice(sorted(self.live)) if self.live else None

    def check(self) -> None:
        """Every field of every request, and that nothing is left where nobody is."""
        batch, tables = self.batch, self.batch.block_table
        assert batch.req_ids == self.rows
        assert batch.num_reqs == len(self.live)
        assert batch.req_id_to_index == {req_id: row for row, req_id in enumerate(self.rows) if req_id is not None}
        assert batch.greedy_reqs == {req_id for req_id, one in self.live.items() if one["temperature"] == 0}
        assert batch.random_reqs == set(self.live) - batch.greedy_reqs
        assert len(batch.req_output_token_ids) == len(self.rows)
        generators = {}
        for row, req_id in enumerate(self.rows):
            if req_id is None:
                assert batch.req_output_token_ids[row] is None
                continue
            one = self.live[req_id]
            assert batch.num_tokens_no_spec[row] == len(one["tokens"]), req_id
            assert batch.token_ids_cpu[row, : len(one["tokens"])].tolist() == one["tokens"], req_id
            assert batch.num_prompt_tokens[row] == one["prompt"], req_id
            assert batch.num_computed_tokens.np[row] == one["computed"], req_id
            assert batch.temperature.np[row] == one["temperature"], req_id
            assert batch.req_output_token_ids[row] is one["outputs"], req_id
            if one["generator"] is not None:
                generators[row] = one["generator"]
        assert batch.generators == generators
        self.check_sampling()
        for g, group in enumerate(tables.groups):
            for row in range(MAX_REQS):
                owner = self.rows[row] if row < len(self.rows) else None
                ids = [] if owner is None else self.live[owner]["blocks"][g]
                assert group.num_blocks_per_row[row] == len(ids), (owner, g)
                assert group.np[row].tolist() == ids + [0] * (group.max_num_blocks - len(ids)), (owner, g)

    def check_sampling(self) -> None:
        """What rows ask of the sampler."""
        rows = self.batch.sampling
        requests = {row: self.live[req_id]["request"] for row, req_id in enumerate(self.rows) if req_id is not None}
        assert set(rows.tables) == set(self.row_bytes)
        for name, users in rows.users.items():
            assert users == {one.req_id for one in requests.values() if name in tables_of(one)}, name
        for row, one in requests.items():
            params = one.sampling
            scalars = {name: getattr(params, name) for name in tables_of(one) - {ALLOWED}}
            for name, table in rows.tables.items():
                value = table.np[row]
                if name == ALLOWED:
                    free = [token for token in range(50) if not value[token]]
                    assert free == sorted(params.allowed_token_ids or range(50)), one.req_id
                else:
                    assert value == np.float32(scalars.get(name, OFF[name])), (one.req_id, name)
        stops = {
            row: MinTokens(one.sampling.min_tokens, one.stop_token_ids, False)
            for row, one in requests.items()
            if one.sampling.min_tokens
        }
        assert rows.min_tokens == stops
        asked = {row: one.sampling.logprobs for row, one in requests.items() if one.sampling.logprobs is not None}
        assert rows.num_logprobs == {row: 50 if k in (-1, 99) else k for row, k in asked.items()}
        for mine, name in ((rows.logit_bias, "logit_bias"), (rows.bad_words, "bad_words")):
            values = {row: getattr(one.sampling, name) for row, one in requests.items()}
            assert mine == {row: value for row, value in values.items() if value}, name
        assert rows.processors == {row: one.processors for row, one in requests.items() if one.processors}


OFF = {"top_k": 50, "top_p": 1, "min_p": 0, "repetition_penalty": 1, "frequency_penalty": 0, "presence_penalty": 0}


def tables_of(request: CachedRequestState) -> set[str]:
    """The tables in which a request has something to say; whoever has one penalty is in all three."""
    params = request.sampling
    names = {name for name in ("top_k", "top_p", "min_p") if getattr(params, name) != OFF[name]}
    if params.top_k == 0 or params.top_k >= 50:
        names.discard("top_k")
    if params.uses_penalties:
        names.update(PENALTIES)
    return names | ({ALLOWED} if params.allowed_token_ids is not None else set())
