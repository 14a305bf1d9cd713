# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The persistent batch: rows that move, rows that stay
#
# **You will** run one schedule through two designs, vLLM's V1 runner and its Model Runner V2 (MRV2), see that they give
# the same tokens, count what each pays to keep its batch, and break both.
# **You need** no GPU; about 20 minutes. Words that are new to you are in [GLOSSARY.md](../GLOSSARY.md).
#
# ## 1. Why a batch persists
#
# A decode step adds one token to each request. Here are 16 requests after some steps: how much does the runner know
# of them, and how much of it did the last step change?

# %%
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd

import mrv2lab
from mrv2lab import Engine, EngineConfig, EventLog, Recorder, SamplingParams, StepExplorer, Workload
from mrv2lab.engine.workload import Arrival

crowd = Engine("tiny", "v1", device="cpu", num_blocks=1024, max_num_reqs=16)
for i in range(16):
    crowd.submit([300 + i] * 300, SamplingParams(max_tokens=100, ignore_eos=True))
while not all(output.token_ids for output in crowd.requests.values()):
    crowd.step()

batch = crowd.worker.runner.input_batch
before = {name: table.copy() for name, table in batch.host_tables().items() if table.ndim and len(table) == 16}
crowd.step()
changed = sum(int((table != before[name]).sum()) for name, table in batch.host_tables().items() if name in before)
known = int(batch.num_tokens_no_spec[:16].sum() + batch.block_table[0].num_blocks_per_row[:16].sum() + 4 * 16)
print(f"{known:,} numbers are known of 16 requests; this step changed {changed} of them")

# %% [markdown]
# So nobody builds the batch anew. It *persists*, and a step edits it. The question is where a request lives in it.
#
# ## 2. V1: a request's row is its place in the batch
#
# Kernels want rows 0, 1, 2, ... without holes. V1's `InputBatch` keeps its rows that way. This is the real class, by
# hand, without a model:

# %%
from mrv2lab.runner_v1.reorder import reorder_batch
from mrv2lab.teach.batch_lesson import batch_alone, request

by_hand = batch_alone(8)


def show(what: str) -> None:
    moves = by_hand.moves
    rows = " ".join(name or "." for name in by_hand.req_ids)
    print(f"{what:32s} {rows:14s} moved {moves.row_moves}, swapped {moves.swaps}, {moves.bytes_moved} bytes")
    moves.reset()


for name in "ABCDE":
    by_hand.add_request(request(name, 40, 40))
show("A to E are decoding")
by_hand.remove_request("B")
show("B has ended: a hole")
by_hand.add_request(request("F", 24, 0))
show("F comes and takes the hole")
by_hand.remove_request("A")
show("A has ended, nobody comes")
by_hand.condense()
show("condense: the last fills the hole")
reorder_batch(by_hand, 1, {"C": 1, "D": 1, "E": 1, "F": 24}, {})
show("reorder: decodes before prefills")

# %% [markdown]
# *Condense* moves the highest row into the lowest hole. *Reorder* swaps rows, but only where an attention backend asks
# for an order (in vLLM FlashInfer and MLA do; FlashAttention and Triton do not), so it is off by default here too. Every
# move must carry **every** field of a row: tokens, counts, temperature, generator, blocks.
#
# ## 3. MRV2: a row for life, and a gather
#
# MRV2 takes a row from a free list when a request is admitted and gives it back when it ends. The batch of a step is a
# list of rows, `idx_mapping`; kernels *gather* through it. The same 14 requests in both (this lesson's helpers are in
# `mrv2lab/teach/batch_lesson.py`, its pictures in `batch_pictures.py`):

# %%
tokenizer = crowd.tokenizer
OPENINGS = (
    "Once upon a time, there was a clever hen", "The old clock", "Tom had a small boat. One day", "A bird sat",
    "The sun was hot and", "Lily found a red ball", "In the forest", "There was a little dog",
    "Mom said", "The king had three sons and", "It was a cold night", "Ben liked to run", "A big fish", "One day a girl",
)  # fmt: skip
rng = np.random.default_rng(4)
arrivals = [
    Arrival(2 * i, tuple(tokenizer.encode(text)), SamplingParams(max_tokens=int(rng.integers(5, 24)), ignore_eos=True))
    for i, text in enumerate(OPENINGS)
]
workload = Workload(tuple(arrivals), "stories")
SMALL = {"device": "cpu", "num_blocks": 64, "max_num_reqs": 8, "max_model_len": 128, "max_num_batched_tokens": 64}


from mrv2lab.teach.batch_lesson import drive, totals

history, tokens, gauges = {}, {}, {}
for kind in ("v1", "mrv2"):
    log = EventLog()
    with Engine("tiny", kind, observer=log, **SMALL) as engine:
        history[kind] = []
        tokens[kind] = drive(engine, workload, history[kind])
    gauges[kind] = totals(log)
print("the same tokens:", tokens["v1"] == tokens["mrv2"])

# %%
from mrv2lab.teach.batch_pictures import rows_picture

rows_picture(history, {"v1": "V1: a row is a place in the batch", "mrv2": "MRV2: a row for life"})

# %% [markdown]
# On the left a line that drops is a request that was moved into somebody's hole, at a moment when nothing happened to
# *it*. On the right every line is straight. How often, counted from the picture and by the runner:

# %%
jumps = Counter({"v1": 0, "mrv2": 0})
for kind, steps in history.items():
    for then, now in pairwise(steps):
        jumps[kind] += sum(now[name] != then[name] for name in now.keys() & then.keys())
print("jumps in the picture:", dict(jumps))
print("V1's own counters:   ", {name: int(gauges["v1"][name]) for name in ("row_moves", "swaps", "bytes_moved")})

# %% [markdown]
# And MRV2's gather, in the step explorer (*Gather*: lines from rows to batch positions):

# %%
with Engine("tiny", "mrv2", **SMALL) as engine, Recorder(engine) as recorder:
    drive(engine, workload)
StepExplorer(recorder.recording, index=12)

# %% [markdown]
# ## 4. Are they really equal? The twin
#
# Equal text is weak evidence. A *twin* drives both runners from one scheduler and compares, step by step, what each
# model read (tokens, positions, lengths, block tables, slots) and what came out, logits included. If V1 is told to
# reorder its batch as MRV2 sorts it, both compute the same matrices and must agree **bit for bit**; in V1's own order
# the rows of a matrix are in other places, and logits are compared within a bound:

# %%
from mrv2lab.check.twin import Twin
from mrv2lab.model.load import load_model

weights = load_model("tiny").weights


def config(kind: str, **options) -> EngineConfig:
    with Engine("tiny", kind, **SMALL, **options) as engine:
        return engine.config


V1, V1_SORTED, MRV2 = config("v1"), config("v1", reorder="mrv2"), config("mrv2")
for v1 in (V1, V1_SORTED):
    with Twin.build(v1, MRV2, weights=weights) as twin:
        print(twin.run(workload))

# %% [markdown]
# ## 5. What moving costs
#
# The number of moves depends on *when* requests come and go, so here are six regimes of the same load (16 requests of
# about 100 tokens), a mean over 24 steps each:

# %%
from mrv2lab.teach.batch_lesson import Load, observe

BIG = {"device": "cpu", "num_blocks": 1024, "max_num_reqs": 32}
regimes = {
    "steady decode": ({}, {}),
    "one ends and one comes every step": ({"gap": 1}, {}),
    "one ends every 3rd step, its successor comes at once": ({"gap": 3}, {}),
    "the same, synchronous loop": ({"gap": 3}, {"async_scheduling": False}),
    "the same, synchronous, successor 1 step late": ({"gap": 3, "late": 1}, {"async_scheduling": False}),
    "synchronous, at once, decodes first (as FlashInfer asks)": (
        {"gap": 3},
        {"async_scheduling": False, "reorder": "decode_first"},
    ),
}
lines = []
for name, (load_options, engine_options) in regimes.items():
    with Engine("tiny", "v1", **BIG, **engine_options) as engine:
        log = observe(Load(engine, 16, **load_options), 12)
    lines.append({"V1, 16 requests": name} | {k: totals(log)[k] / 12 for k in ("row_moves", "swaps", "bytes_moved")})
pd.DataFrame(lines).set_index("V1, 16 requests").rename(columns=lambda k: f"{k} a step").round(2)

# %% [markdown]
# In MRV2 all of these are 0 by construction: there is no code that moves a row. But look where V1's are (nearly) 0 as
# well: in steady decode, and wherever a newcomer takes the hole in the very step in which it opens. With asynchronous
# scheduling a request that ends by length leaves V1's batch one step *before* its end is known (its last token is
# already in flight, so it is not scheduled), so the hole is closed before a successor can come.
#
# How large is a move? `InputBatch` alone, without a model: of 64 requests some end in one step, and as many come in the
# next.

# %%
from mrv2lab.teach.batch_lesson import churn
from mrv2lab.teach.batch_pictures import condense_picture

lengths, counts, rates = (64, 256, 1024, 4096), (8, 16, 64, 256), (1, 2, 4, 8, 16)
curves = {
    "length of a request (tokens)": (lengths, [churn(64, n, 1) for n in lengths]),
    "requests in the batch": (counts, [churn(n, 1024, 1) for n in counts]),
    "requests that end in the step": (rates, [churn(64, 1024, n) for n in rates]),
}
condense_picture(curves)

# %%
for title, (x, costs) in curves.items():
    print(
        f"{title:32s}", "   ".join(f"{n}: {c[0] / 1024:.1f} KiB, {c[1]:.0f} µs" for n, c in zip(x, costs, strict=True))
    )

# %% [markdown]
# The bytes grow with the length of the requests and with how many end, not with the size of the batch. But bytes are
# cheap: compare the microseconds above with the host time of a whole step in section 8 before you call moving slow.
# (In vLLM a row has about 20 fields and, for some requests, a mask as wide as the vocabulary.) What moving really
# costs shows in section 7.
#
# ## 6. What crosses the bus
#
# The other half of the design: V1's truth is on the host and is copied *whole* in every step; MRV2's truth is on the
# device, and only *diffs* are sent. Steady decode of 16 requests, by array:

# %%
from mrv2lab.teach.batch_lesson import bus

crossed = {}
for kind in ("v1", "mrv2"):
    with Engine("tiny", kind, **BIG) as engine:
        crossed[kind] = bus(observe(Load(engine, 16), 32), 32)
pd.concat(crossed, names=["runner", "array"]).round(1)

# %% [markdown]
# V1 sends per-token and per-request arrays that MRV2 computes on the device, and the block table as a rectangle,
# requests x blocks of `max_model_len`, changed or not. MRV2 sends which rows (`idx_mapping`) and where their tokens
# begin, and a block only when a request gets one (every 16th token). The rectangle grows in both directions:

# %%
from mrv2lab.teach.batch_pictures import bus_picture


def bytes_a_step(kind: str, count: int, limit: int) -> float:
    with Engine("tiny", kind, device="cpu", num_blocks=1024, max_num_reqs=64, max_model_len=limit) as engine:
        return bus(observe(Load(engine, count, prompt=20), 16), 16).loc["all", "bytes a step"]


sizes, limits = (1, 4, 16, 64), (256, 512, 1024)
by_size = {kind: [bytes_a_step(kind, n, 1024) for n in sizes] for kind in ("v1", "mrv2")}
by_limit = {kind: [bytes_a_step(kind, 16, n) for n in limits] for kind in ("v1", "mrv2")}
bus_picture({
    "max_model_len 1024": ("requests", sizes, by_size), "16 requests": ("max_model_len (tokens)", limits, by_limit)
})  # fmt: skip

# %%
print({kind: [round(n) for n in sent] for kind, sent in by_size.items()}, "bytes a step with", sizes, "requests")
print(
    f"V1 sends {by_size['v1'][0] / by_size['mrv2'][0]:.1f} times the bytes at 1 request, {by_size['v1'][-1] / by_size['mrv2'][-1]:.0f} times at 64"
)

# %% [markdown]
# For a single request there is little between them: both send `query_start_loc` in full, `max_num_reqs` + 1 values. And
# a few kilobytes are nothing to a bus; what counts there is the *number* of copies, since each has a fixed price.
#
# ### A request that pauses, a request that comes back
#
# V1 keeps in the batch only who is scheduled. We make the scheduler pass over one of four requests for a step, then
# preempt one (it loses its blocks and is computed again):

# %%
from mrv2lab.teach.batch_lesson import pause_and_preempt

pd.concat({kind: pause_and_preempt(kind) for kind in ("v1", "mrv2")}, names=["runner"])

# %% [markdown]
# A pause costs V1 a row twice, and all token ids of the request once more; MRV2 does nothing, since the row stays and
# is just not gathered. Coming back after a preemption costs **both** the same: the whole history is sent and computed
# again. Permanent rows gain nothing there. (V1 calls it resumed, MRV2 calls it new.)
#
# ## 7. Two bugs, one of each kind
#
# What can go wrong in each design? `teach.mutants` holds deliberate bugs, attached in a `with`. In V1: one field that a
# move forgets. In MRV2: rows are recycled without clearing, so one table that a newcomer does not overwrite.

# %%
from mrv2lab.teach import mutants

for mutant, right, broken in (
    (mutants.condense_forgets_blocks, MRV2, V1_SORTED),
    (mutants.row_keeps_tokens, V1_SORTED, MRV2),
):
    with Twin.build(right, broken, weights=weights, around_b=mutant) as twin:
        report = twin.run(workload)
    print(f"{mutant.name}: {mutant.breaks}\n  -> {report.difference}\n")

# %% [markdown]
# The twin stops at the first difference, at the input that was wrong, long before a text looks odd. Without it you would
# have this, plausible and wrong:

# %%
for mutant in (mutants.condense_forgets_blocks, mutants.row_keeps_tokens):
    with mutant(), Engine("tiny", mutant.runner, **SMALL) as engine:
        wrong = drive(engine, workload)
    victims = [name for name in wrong if wrong[name] != tokens["mrv2"][name]]
    print(f"{mutant.name}: {len(victims)} of {len(wrong)} texts are wrong. {victims[0]} should be and is:")
    print("   ", repr(tokenizer.decode(tokens["mrv2"][victims[0]])), "\n   ", repr(tokenizer.decode(wrong[victims[0]])))

# %% [markdown]
# Neither design is safe from forgetting a field. But in MRV2 there is one place where it can be forgotten, `add`; in V1
# there are three more (condense, swap, and everything keyed by row outside the batch), and they only run when somebody
# else ends. A test in steady decode never sees them:

# %%
quiet = Workload(
    tuple(Arrival(0, arrival.prompt, SamplingParams(max_tokens=20, ignore_eos=True)) for arrival in arrivals[:8]),
    "quiet",
)
with Twin.build(MRV2, V1_SORTED, weights=weights, around_b=mutants.condense_forgets_blocks) as twin:
    print("eight requests that end together:", twin.run(quiet))

# %% [markdown]
# ## 8. Where MRV2 gains nothing
#
# Host time of the runner's own phases (model and scheduler are the same code; waits are left out), on *this* machine,
# where queueing is plain Python: medians over 24 steps of 32 requests. And how much a step queues besides the model:

# %%
from mrv2lab.bench.runner_bench import host_times

OWN = "update_states apply_writes prepare_inputs gather prepare_attn sample copy_output postprocess".split()
MODEL = ("layer.", "embed", "final_norm", "logits")
table = {}
for name, options in (("steady", {}), ("one ends and one comes every step", {"gap": 1})):
    for kind in ("v1", "mrv2"):
        with Engine("tiny", kind, device="cpu", num_blocks=1024, max_num_reqs=64) as engine:
            load = Load(engine, 32, prompt=24, **options)
            times = host_times(load, 24)  # microseconds; listens to spans alone, so that listening costs both the same
            marks = observe(load, 16).marks
        launches = sum(mark.kind in ("kernel", "run") and not mark.name.startswith(MODEL) for mark in marks) / 16
        copies = sum(mark.kind == "h2d" for mark in marks) / 16
        table[name, kind] = {phase: times.get(phase, 0.0) for phase in OWN} | {
            "all of these (µs)": times["runner's own phases"], "launches outside the model": launches, "H2D copies": copies
        }  # fmt: skip
pd.DataFrame(table).round(1)

# %% [markdown]
# In steady decode no row moves in either design. Compare the sums: where this was written MRV2's host was the faster
# one in neither load. What V1 spends on copies, MRV2 spends on more small launches, and under churn on staging and
# applying diffs (`apply_writes`; in steady decode it has something to do only when somebody gets a block, which a
# median does not show). MRV2's kernels also read tables in place over the bus (UVA), and state on the device is
# harder to print: you must wait for it. What MRV2 buys is not fewer microseconds of moving rows; it is that the host
# does not need to know tokens and counts, so that nobody has to wait for them
# ([02_async_first](02_async_first.ipynb)), and a family of bugs that cannot be written.
#
# A CPU's queueing is not a GPU's launching. The same comparison measured on an H200, if this checkout has it:

# %%
from mrv2lab.teach.batch_lesson import result_table

results = sorted(Path(mrv2lab.__file__).parent.glob("bench/results/*h200-runner*.json"))
missing = "no file yet: python -m mrv2lab.bench.runner_bench --device cuda --out FILE makes one"
print(results[-1].name if results else missing)
result_table(pd.read_json(results[-1], typ="series")["figures"]) if results else None

# %% [markdown]
# (Times are medians of five repetitions' medians; *spread* is the largest of the five minus the smallest. *churn*: one
# request ends and one comes in nearly every step.) In the file of 2026-11-29 V1's own phases are shorter up to 64
# requests and about equal at 256 in steady decode, though there MRV2 makes 2 copies (5 KB in all) where V1 makes 7
# (142 KB); under churn MRV2 pays for `apply_writes`, and V1 moves hardly a row, since a newcomer takes the hole at once.
# No runner wins overall in this eager mode: launching the model, the same code in both, takes most of every step.

# %% [markdown]
# ## Try
#
# 1. In section 3, give the V1 engine `reorder="decode_first"`, then `reorder="mrv2"` (a key that no backend of V1 asks for).
#    Expect a few pairs of lines that change places, then many.
# 2. In section 3, give both engines `async_scheduling=False`. Expect fewer jumps in V1, since a hole is open when a
#    newcomer comes more often, and still none in MRV2.
# 3. In section 5, set `"gap": 1` in the fifth regime. Expect fewer moves, though more requests end: each hole is taken by
#    the successor of somebody who ended a step before.
# 4. In section 7, try `mutants.swap_forgets_blocks` with `(MRV2, V1_SORTED)` and then with `(V1, V1)`. Expect a difference
#    in the first case and none in the second, where no backend asks for an order and nothing swaps.
# 5. Which mutants of MRV2 does the twin find with `workload`? `from mrv2lab.teach.batch_lesson import hunt`, then
#    `hunt([m for m in mutants.ALL if m.runner == "mrv2"], workload, V1_SORTED, MRV2, weights)`. Expect 14 of 28 found. One
#    ends the run with an error (`row_leaks`: no free row). 13 escape: 6 that a twin is not said to catch (no `twin` in
#    `caught_by`: other checks look at state that no token shows here), the 2 of the barrier, which `needs` says MRV2 uses
#    only on request, and 5 for which this workload is too tame: all requests are greedy (seed, temperature, noise),
#    nobody is preempted (resumption), no prompt is cut into chunks. A test finds only what its workload does.
