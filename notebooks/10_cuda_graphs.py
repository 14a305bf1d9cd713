# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # CUDA graphs: one launch for a step, and what it asks in return
#
# **You will** see how much of a decode step is launching, look up batches in the table of shapes, ask of every step of a
# live run why it was eager, see padding waste, move a buffer that a graph has frozen, leave a padded tail dirty, and set
# V1's dispatcher beside MRV2's manager.
# **You need** no GPU; 20 minutes. Words that are new to you are in [GLOSSARY.md](../GLOSSARY.md).
# **Live**; without a GPU a graph is a *tape*: queued records that are queued again by one call, over the same buffers.
# What it saves on the host is real there; device times are modelled. Figures from an H200 come from a file that its
# cell names.
#
# ## 1. Why: the host launches kernel by kernel
#
# Every kernel is launched by the host, some microseconds each, hundreds a step. In a decode step of few requests a GPU is
# done with a kernel before the host has launched the next, and waits. A graph holds them all and is launched once. Launching
# costs the same for any batch; its share shrinks as kernels take longer. On a fast GPU with a small model that is late: below,
# 256 requests still leave the device waiting for its launches.

# %%
import numpy as np
import pandas as pd
from IPython.display import display

from mrv2lab import Engine, SamplingParams
from mrv2lab.bench.result import newest_result
from mrv2lab.teach.graph_lesson import launch_share
from mrv2lab.teach.graph_pictures import launch_picture, padding_picture, shapes_picture
from mrv2lab.teach.sampling_pictures import STATIC

pd.set_option("display.max_colwidth", None)
recorded = newest_result("h200-graphs")
if recorded is None:
    print(
        "No H200 figures here: `python -m mrv2lab.bench.graph_bench --out FILE` on a GPU makes them; the file belongs "
        "into mrv2lab/bench/results as DATE-h200-graphs.json. Below: this machine."
    )
else:
    figures = recorded["figures"]
    print(f"{recorded['machine']['gpu']}, {recorded['date'][:10]}, {figures['model']}")
    title = "Launching the forward pass, of a decode step (H200)"
    launch_picture(pd.DataFrame(figures["rows"]), title).show(config=STATIC)
    costs = pd.DataFrame(figures["captures"])[["mode", "graphs", "launches", "nbytes", "seconds"]]
    display(costs.assign(MiB=costs.pop("nbytes") / 2**20).round(2))

# %% [markdown]
# The same measurement on the machine that this notebook runs on, with the small model. *eager* launches segment by
# segment, *graph* once:

# %%
frame = launch_share((1, 2, 4, 8, 16))
display(frame.pivot(index="requests", columns="way", values=["forward_us", "step_us"]).round(0))
launch_picture(frame, "This machine, the tiny model: launching / step").show(config=STATIC)

# %% [markdown]
# (On a CPU the rest of the step is the machine computing, late, what a device would have computed meanwhile. So take from
# this picture that one replay costs the host less than seventeen launches, and no more.)
#
# ## 2. Captured beforehand, one shape at a time
#
# A graph has the shapes it was captured with. So MRV2's `CudaGraphManager` makes a *table of shapes* and captures all of
# them before the first request: pieces before whole graphs, the largest first, so that the smaller ones reuse its memory.

# %%
from mrv2lab.teach.graph_lesson import reasons, shapes, steps

SIZES = (1, 2, 4, 8)
OPTIONS = {"cudagraph_mode": "full_and_piecewise", "cudagraph_capture_sizes": SIZES, "progress": False}
OPTIONS |= {"max_num_reqs": 6, "max_model_len": 128, "num_blocks": 128}
engine = Engine("tiny", **OPTIONS)
manager = engine.worker.runner.graphs
print(engine.graph_report())
shapes(manager)[["mode", "tokens", "requests", "from_tokens", "to_tokens", "graphs", "nbytes"]]

# %% [markdown]
# * **full**: everything between the prepared inputs and the hidden states, attention too, in one graph. For *plain decodes*:
#   every request has one token, so the number of tokens says it all.
# * **piecewise**: the segments *between* attentions, a graph each. They depend on the number of tokens alone; attention,
#   which depends on who has how many, runs outside, eagerly, over the tokens there are.
# * **eager**: no graph holds it. Then nothing is padded either.
#
# At most 6 requests here, so 6 decodes have a graph of their own although 6 is no capture size.
#
# ## 3. Dispatch: (requests, tokens, longest query) -> graph
#
# With drafts a plain decode has more than one token. Let it be 3, sizes 1, 2, 4, 8, at most 8 requests. Before you look:
# which batch goes where?

# %%
from mrv2lab.config import GraphConfig, SchedulerConfig
from mrv2lab.graphs import DispatchTable

table = DispatchTable(GraphConfig("full_and_piecewise", SIZES), SchedulerConfig(8, 64, 64), decode_query_len=3)
batches = {
    "2 requests of 3": (2, 6, 3),
    "1 request of 3": (1, 3, 3),
    "a mix of 5 tokens": (2, 5, 4),
    "3 of 3": (3, 9, 3),
}
rows = {name: table.dispatch(*batch) for name, batch in batches.items()}
display(pd.DataFrame({"graph": {n: str(d.descriptor or "eager") for n, d in rows.items()},
                      "why": {n: d.reason for n, d in rows.items()}}))  # fmt: skip
print("full graphs:", [str(one) for one in table.candidates() if one.mode == "full"])

# %% [markdown]
# A full graph of a decode of 3 has a multiple of 3 tokens: sizes 1 and 2 become 3, 4 becomes 6, and 8 would become 9, which
# is over the largest size. The answers are made beforehand, one a token count; a step only looks one up.
#
# ## 4. Why was this step eager?
#
# Requests of several lengths come in, one after the other. Every step has a reason:

# %%
for i, length in enumerate((3, 5, 30, 2, 7, 4, 12)):
    engine.submit([7 * i + k + 1 for k in range(length)], SamplingParams(max_tokens=8 + 3 * i, ignore_eos=True))
    engine.step()
    engine.step()
while engine.has_work():
    engine.step()
steps(manager.stats).head(18)

# %%
print("step 0 was", manager.stats.why(0))
display(reasons(manager.stats))
shapes_picture(manager.rows(), manager.stats).show(config=STATIC)
padding_picture(manager.stats).show(config=STATIC)

# %% [markdown]
# Crossed is padding: tokens that were computed for nobody. More sizes waste less, and each costs a capture at start and
# memory. (vLLM's default: 1, 2, 4, then every 8th up to 256, then every 16th.) What
# other sizes would have cost these steps, if each took the nearest one and R had no graph of its own:

# %%
from mrv2lab.teach.graph_lesson import best_sizes, padding_of

tokens = [one.num_tokens for one in manager.stats.recent]
choices = {"1, 2, 4, 8": SIZES, "8": (8,), "the best three": best_sizes([n for n in tokens if n <= 8], 3)}
display(pd.DataFrame({n: {"sizes": s, "tokens for nothing": padding_of(tokens, s)} for n, s in choices.items()}).T)

# %% [markdown]
# ## 5. Addresses are frozen
#
# A graph holds addresses, not names. All that it reads must stay where it was at capture; kernels outside fill the same
# places anew each step. MRV2's input buffers are allocated once. What if one is not? Here one of them lies elsewhere
# for the time of a `with`: the preparation fills the new one, the graphs read the old.

# %%
from mrv2lab.teach.graph_lesson import moved_buffer

PROMPTS = ["Once upon a time", "The old clock", "A bird sat"]
greedy = SamplingParams(max_tokens=16, ignore_eos=True)


def texts():
    return [output.text for output in engine.generate(PROMPTS, greedy)]


right = texts()
with moved_buffer(engine, "input_ids"):
    wrong = texts()
    audit = manager.audit()
display(pd.DataFrame({"as captured": right, "input_ids moved": wrong}))
print(f"{len(audit)} lines of the audit; the first: {audit[0]}\nand now: {manager.audit() or 'nothing has moved'}")

# %% [markdown]
# No error, and nothing on the device can tell. The manager's *audit* can: every launch of a graph has noted which buffers it
# reads and writes, and a look into the runtime's register says whether they are still there.
#
# Does a graph compute what a launched step computes? At the padded shape it must, to the last bit:

# %%
logits = {}
for replay in (True, False):
    engine.worker.runner.forward_pass.replay = replay  # False: launch what a graph would replay, padded alike
    for prompt in PROMPTS:
        engine.submit(prompt, SamplingParams(max_tokens=6, ignore_eos=True))
    logits[replay] = []
    while engine.has_work():
        engine.step()
        logits[replay].append(engine.rt.read(engine.worker.runner.logits).float().numpy())
engine.worker.runner.forward_pass.replay = True
same = all(np.array_equal(one, other) for one, other in zip(logits[True], logits[False], strict=True))
print(f"{len(logits[True])} steps, graph and launched at the padded shape: equal in every bit: {same}")

# %% [markdown]
# ## 6. Padded tails
#
# A graph of 8 requests that serves 2 computes 8. What do the other six read? Eight requests decode, then only two are
# left, with 8 as the only size. First what the graph's inputs hold in the step of eight, then in that of two:

# %%
from mrv2lab.graphs.padding import padding_faults, tail_faults

only_8 = OPTIONS | {"cudagraph_capture_sizes": (8,), "max_num_reqs": 8, "cudagraph_mode": "full_decode_only"}
with Engine("tiny", **only_8) as padded:
    for i in range(8):
        padded.submit([i + 1, 2, 3], SamplingParams(max_tokens=6 if i < 6 else 20, ignore_eos=True))
    runner, seen = padded.worker.runner, {}
    while padded.has_work():
        padded.step()
        batch = runner.batch
        if batch is not None and batch.host.is_plain_decode and batch.num_reqs not in seen:
            metadata = runner.forward_inputs.attn_metadata[0]
            fields = ("query_start_loc", "seq_lens", "block_table", "slot_mapping")
            tensors = {name: getattr(metadata, name) for name in fields}
            seen[batch.num_reqs] = {name: padded.rt.read(tensor).numpy().copy() for name, tensor in tensors.items()}
            if batch.num_reqs == 2:
                faults = padding_faults(padded.rt, 2, 2, **tensors)
first_blocks = {"block_table": lambda array: array[:, 0]}
display(pd.DataFrame({f"{n} requests": {f: str(first_blocks.get(f, lambda a: a)(a)) for f, a in arrays.items()}
                      for n, arrays in seen.items()}).rename(index={"block_table": "first block of each row"}))  # fmt: skip
print("faults in the step of two:", faults or "none")
print("had the tails been left as the eight had them:", *tail_faults(2, 2, *seen[8].values()), sep="\n  ")

# %% [markdown]
# Slots -1: nothing is written. Lengths 0: nothing is read. `query_start_loc` flat: padding owns no token. Block rows null.
# Each was forgotten once: stale slots overwrote somebody's KV (vLLM #36580), stale block rows were read (#35431). In
# MRV2 the kernels that prepare a step fill the tails in the same launch.
#
# ## 7. V1's dispatcher beside it
#
# Same job, same sizes, same decoder:

# %%
from mrv2lab.teach.graph_contrast import contrast_picture, differing, dispatch_contrast, run_both, structure

display(structure())
contrast = dispatch_contrast(GraphConfig("full_and_piecewise", SIZES), SchedulerConfig(6, 64, 64))
contrast_picture(contrast).show(config=STATIC)
differing(contrast)[["batch", "tokens", "v1", "v1_why", "mrv2", "mrv2_why"]]

# %% [markdown]
# Between sizes 4 and 8 V1 has no key for at most 6 requests, so 5 and 6 decodes go in pieces, as 8 tokens; MRV2 rounds the
# last size down to R. Everywhere else they agree. What a small run launches, and whether both say the same:

# %%
both = run_both(cudagraph_capture_sizes=SIZES)
print("the same tokens:", both["text"].iloc[0] == both["text"].iloc[1])
both.drop(columns=["text", "seconds", "nbytes"])

# %% [markdown]
# MRV2 does not launch less. V1 launches the tails' fills by themselves; MRV2 has launches of its own (diffs, rows). What
# differs is where things are: in V1 the capture hides in the model's wrapper, where a dummy run meets a key for the
# first time and the forward captures instead of running; in MRV2 it is a loop over a table.
#
# ## Exercises
#
# Each answer below is plausible and wrong, or missing. Run the cell, read the reason, repair it.
#
# **1. Dispatch.** Sizes 1, 2, 4, 8, at most 6 requests, `full_and_piecewise`.

# %%
from mrv2lab.teach.graph_exercises import check_dispatch, check_launches, check_moved, check_padding, check_sizes


def graph(num_reqs, num_tokens, max_query_len):
    size = next((size for size in SIZES if size >= num_tokens), None)
    if size is None:
        return None
    return ("full", size) if num_reqs == num_tokens else ("piecewise", size)


check_dispatch(graph)

# %% [markdown]
# **2. Sizes.** At most four sizes for this day's steps: none eager, as little padding as can be.

# %%
DAY = [1] * 40 + [3] * 30 + [6] * 25 + [7] * 20 + [24] * 10 + [30] * 4 + [64]
check_sizes((8, 16, 32, 64), DAY)


# %% [markdown]
# **3. Tails.** Make a step's inputs safe behind its `num_reqs` requests and `num_tokens` tokens.


# %%
def pad(num_reqs, num_tokens, query_start_loc, seq_lens, block_table, slot_mapping):
    query_start_loc[num_reqs + 1 :] = 0
    seq_lens[num_reqs:] = 0
    block_table[num_reqs:] = 0
    slot_mapping[num_reqs:] = -1


check_padding(pad)

# %% [markdown]
# **4. Find what moved.** A buffer has been moved. Which? `manager.audit()` may be asked inside the `with`.

# %%
with moved_buffer(engine, seed=4):
    verdict = check_moved(manager, None)
verdict

# %% [markdown]
# **5. Count launches.** The decoder launches its embedding, three segments a layer (before attention, attention, behind it)
# and a final norm. How often does the host launch something for one forward pass?

# %%
print(engine.config.model.num_hidden_layers, "layers")
check_launches(manager, eager=0, piecewise=0, full=0)

# %%
engine.close()
