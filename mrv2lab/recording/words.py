"""A step in plain sentences: who came, who computes what, and why the scheduler did something out of the ordinary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mrv2lab.recording.schema import StepRecord


class Share(NamedTuple):
    """What one request of the batch computes in a step. Tokens."""

    req_id: str
    kind: str
    """``prefill``, ``chunk`` (does not reach the end of its prefill) or ``decode``."""
    num_tokens: int
    num_computed: int
    """Before the step."""
    prefill_len: int


def count(n: int, noun: str) -> str:
    """``1 block``, ``2 blocks``."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


DECISIONS = {
    "preempt": "{who} preempted: {blocks} needed, {free} free",
    "no_blocks": "{who} waits: {blocks} needed, {free} free",
    "full_sequence": "{who} waits until its whole sequence fits: {blocks} needed, {free} free",
    "rows": "{who} waits: every row is taken",
    "draining": "{who} waits until {tokens} from before its preemption came back",
    "after_preemption": "{who} waits: nobody is admitted in a step that preempted",
    "budget": "{who} gets {free} of the {tokens} it could compute: a step's tokens are limited",
    "last_token": "{who} sits out: the step in flight gives its last token",
    "prefix_hit": "{who}: {free} of {tokens} found in the prefix cache",
}
"""``engine.records.Decision`` by kind; ``needed`` as blocks or tokens, and ``free``."""


def decision_words(kind: str, req_id: str, needed: int, free: int) -> str:
    """One decision in words. A kind that this version does not know is shown as it is."""
    sentence = DECISIONS.get(kind)
    if sentence is None:
        return f"{req_id}: {kind} (needed {needed}, free {free})"
    return sentence.format(who=req_id, free=f"{free:,}", blocks=count(needed, "block"), tokens=count(needed, "token"))


def step_words(record: StepRecord, batch: Sequence[Share], row_of: dict[str, int]) -> list[str]:
    """The step's sentences. ``row_of``: the row of each request after the step."""
    words = []
    if record.gauges.get("in_flight", 0) >= 1:
        words.append(f"step {record.step} was scheduled before step {record.step - 1}'s tokens were known")
    for req_id, row in record.removed:
        words.append(f"row {row} is free again: {req_id} {'ended' if req_id in record.finished else 'was preempted'}")
    words += [decision_words(*decision) for decision in record.decisions]
    decided = {req_id for kind, req_id, *_ in record.decisions if kind == "preempt"}
    words += [f"{req_id} preempted: its blocks were taken away" for req_id in record.preempted if req_id not in decided]
    for new in record.new:
        if new.resumed:
            what = f"{new.req_id} comes back into row {new.row}: {count(new.prefill_len, 'token')} of prompt and output"
        else:
            what = f"{new.req_id} enters row {new.row}: {count(new.prefill_len, 'prompt token')}"
        words.append(f"{what}, of which {new.num_computed_tokens:,} cached")
    words += _batch_words(batch)
    words += [f"{req_id} runs but gets no token in this step" for req_id in record.unscheduled]
    if record.sampled is not None and not record.rows.size:
        words.append("nobody computes anything: the runner only hears who is gone")
    for req_id, reason in record.finish_reasons.items():
        words.append(f"{req_id} ended ({reason})" + _row_freed(req_id, row_of))
    return words


def _row_freed(req_id: str, row_of: dict[str, int]) -> str:
    return f"; its row {row_of[req_id]} is freed at the next step" if req_id in row_of else ""


def _batch_words(batch: Sequence[Share]) -> list[str]:
    words = []
    for share in batch:
        left = share.prefill_len - share.num_computed
        if share.kind == "prefill":
            words.append(f"{share.req_id} prefills {count(share.num_tokens, 'token')}")
        elif share.kind == "chunk":
            words.append(f"{share.req_id} prefills a chunk: {share.num_tokens:,} of the {count(left, 'token')} left")
    decodes = [share for share in batch if share.kind == "decode"]
    if len(decodes) == 1:
        words.append(f"{decodes[0].req_id} decodes {_tokens(decodes[0].num_tokens)}")
    elif decodes:
        most = max(share.num_tokens for share in decodes)
        each = "one token each" if most == 1 else f"up to {most:,} tokens each"
        words.append(f"{len(decodes):,} requests decode {each}")
    return words


def _tokens(n: int) -> str:
    return "one token" if n == 1 else count(n, "token")
