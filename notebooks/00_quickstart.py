# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Quickstart: step a real batch
#
# **You will** run a language model's inference engine, step by step, and see what a step keeps, moves and produces.
# **You need** nothing: no GPU, no download. On a machine without a GPU the device is a *software stream* that runs
# queued work late, as a GPU does. About 10 minutes. Every word that is new to you is in [GLOSSARY.md](../GLOSSARY.md).
#
# To run a section again, start from the first cell, which makes a new engine, or give other request ids.

# %%
import pandas as pd

from mrv2lab import Engine, EventLog, Observer, SamplingParams, burst, steady

engine = Engine(model="tiny", num_blocks=64, max_num_reqs=8, max_num_batched_tokens=64)
print(f"{engine.config.model.name} on {engine.rt.device}, kernels: {engine.rt.backend}")

# %% [markdown]
# `kernels: spec` means that each GPU kernel's definition in NumPy or PyTorch runs in the kernel's place; on a GPU it is
# `triton`, the kernels themselves.
#
# ## 1. Text comes out
#
# `tiny` is a small Llama that was trained by this project on short stories; it ships in the package.

# %%
prompts = ["Once upon a time", "The old clock"]
for output in engine.generate(prompts, SamplingParams(max_tokens=64)):
    print(f"[{output.finish_reason}, {output.steps} steps] {output.prompt}{output.text}\n")

# %% [markdown]
# Why 65 steps for 64 tokens? Each step computes one token of a request, and that token comes back one step later.
#
# ## 2. One step at a time
#
# `submit` only queues a request. Each `step()` lets the scheduler decide who computes how many tokens, gathers those
# requests into a batch, runs the model once and samples. Scheduling is *asynchronous*: step N + 1 is queued before step
# N is waited for, so the first call returns nothing.

# %%
prompts = {
    "hen": "Once upon a time, there was a clever hen",
    "clock": "The old clock",
    "boat": "Tom had a small boat. One day",
}
for name, prompt in prompts.items():
    engine.submit(prompt, SamplingParams(max_tokens=24, temperature=0.7, seed=7), request_id=name)

for _ in range(4):
    back = {output.request_id: output.new_text for output in engine.step()}
    print(f"scheduled {engine.core.last_schedule.num_scheduled_tokens}   came back: {back}")

# %% [markdown]
# The first schedule has whole prompts in it, the later ones a single token each: there is no prefill phase and no
# decode phase, only a count of computed tokens that chases a count of known ones.
#
# ## 3. Persistent rows
#
# Each request owns a **row** of the state tables for as long as it lives. A step's batch is *gathered* from the rows,
# in whatever order it likes; nothing ever moves. `rows()` reads the device, so it makes the host wait for it: use it
# between steps. A finished request is still in it until the next step gives its row back.


# %%
def with_text_ends(rows: pd.DataFrame):
    """The same table with the last 50 characters of each text, left-aligned."""
    ends = rows.assign(text=rows["text"].str[-50:])
    return ends.style.set_properties(subset=["text"], **{"text-align": "left", "white-space": "pre"})


with_text_ends(engine.rows())

# %% [markdown]
# `prefill_len` counts the tokens that were handed over with the request: its prompt (and more after a preemption,
# section 6). `num_computed` is one behind `total_len` for every request that decodes: the last sampled token's keys and
# values are computed by the next step.
#
# The free rows are a stack: last in, first out. Section 1 took rows 7 and 6 and gave them back in that order, so `hen`
# got 6, `clock` 7, and `boat` the next one, 5. Now `clock` ends and `bird` comes:

# %%
engine.abort("clock")
engine.step()
engine.submit("A bird sat", SamplingParams(max_tokens=24), request_id="bird")
for _ in range(3):
    engine.step()
with_text_ends(engine.rows())

# %% [markdown]
# `bird` took the row that `clock` left. The row was not cleared; every table in it was overwritten.
#
# ## 4. What a step asks of the machine
#
# Everything the device is told passes a few chokepoints, and an observer may listen there. Here is one decode step:
# the kernels, the functions that PyTorch computes (`run`), the copies to the device (`h2d`) and back (`d2h`), and the
# only thing the host waits for. (`rows()` made the device finish everything, so one step goes first: now there is work
# in flight, as there always is in a running engine.)

# %%
engine.step()
log = EventLog()
engine.observer = log
engine.step()
engine.observer = Observer()  # the null observer: nobody listens any more

columns = ["kind", "name", "stream", "nbytes"]
marks = pd.DataFrame([[getattr(mark, column) for column in columns] for mark in log.marks], columns=columns)
print(marks.kind.value_counts().to_string(), "\n")
print("the host waited for:", [(mark.kind, mark.name) for mark in log.waits()])
marks[~marks.name.str.startswith("layer.")]

# %%
phases = pd.DataFrame([(span.name, span.duration_ns / 1e3) for span in log.spans], columns=["phase", "host us"])
phases.groupby("phase", sort=False).sum().round(1)

# %% [markdown]
# On a machine without a GPU the longest phase is `wait_output`: the host waits for the step before, and only then does
# that step's queued work really run. `forward` merely queues this one's. So these are the host's times and say nothing
# about a GPU.
#
# ## 5. The race that all this is about
#
# The host prepares step N + 1 while the device runs step N. If both use the same page-locked buffer, the host
# overwrites what the device has yet to read: no error, plausible shapes, wrong tokens. Four ways to hand data over,
# the same workload (its prompts are random tokens, so the texts begin in mid-air). `lag` is how many steps the device
# trails the host.


# %%
def tokens(transfer: str, **options: int) -> list[list[int]]:
    with Engine("tiny", device="cpu", transfer=transfer, num_blocks=128, **options) as one:
        report = one.run(steady(8, every=1, prompt_len=(4, 12), max_tokens=16, seed=1), progress=False)
        return [output.token_ids for output in report.outputs.values()]


truth = tokens("pinned_copy", lag=0)  # lag 0: the device keeps up with the host, so nothing can be overwritten
got = {transfer: tokens(transfer) for transfer in ("unsafe", "barrier", "pinned_copy", "uva_pool")}
got["uva_pool, one slot"] = tokens("uva_pool", pool_depth=1)
for transfer, result in got.items():
    print(f"{transfer:20s}", "right" if result == truth else "WRONG")

right, wrong = next(pair for pair in zip(truth, got["unsafe"], strict=True) if pair[0] != pair[1])
print("\nright: ", repr(engine.tokenizer.decode(right)))
print("unsafe:", repr(engine.tokenizer.decode(wrong)))

# %% [markdown]
# `unsafe` has one buffer and nobody waits. `barrier` (vLLM's V1) makes the host wait for the previous copies.
# `pinned_copy` (the Model Runner V2 design document) copies into a fresh page-locked temporary each time. `uva_pool`
# (vLLM today) writes into the next of two slots, which is safe as long as no more than two steps are in flight.
#
# ## 6. A tight pool: preemption
#
# The KV cache is a pool of blocks. When it runs dry, the request admitted last loses its blocks (it is *preempted*),
# and is computed again later from prompt and outputs. The text does not change. (A *wasted row* would be one computed
# for a request that had ended a step before, which the host could not know yet; with a fixed length it can.)

# %%
work = burst(6, prompt_len=(8, 20), max_tokens=32, seed=2)
with Engine("tiny", device="cpu", num_blocks=128) as roomy, Engine("tiny", device="cpu", num_blocks=10) as tight:
    one, other = roomy.run(work, progress=False), tight.run(work, progress=False)
print(one)
print(other)
same = [a.token_ids == b.token_ids for a, b in zip(one.outputs.values(), other.outputs.values(), strict=True)]
print("same tokens:", same)

# %% [markdown]
# ## Try
#
# 1. Give `Engine(..., async_scheduling=False)` in the first cell, then run section 2 again: which call returns the
#    first token now?
# 2. Set `max_num_batched_tokens=8` in the first cell, then run section 2 again with `range(8)` and look at
#    `engine.core.last_schedule.num_scheduled_tokens`: prompts are computed in chunks.
# 3. With the first cell as it was, submit the same prompt of 20 words twice, with an `engine.step()` after each, and
#    look at `engine.scheduler.stats.prefix_hit_tokens`: only full blocks of 16 tokens are shared.
