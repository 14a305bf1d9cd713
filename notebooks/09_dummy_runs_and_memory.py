# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Before the first request: dummy runs, warm-up, and who gets the memory
#
# **You will** run a batch that is nobody's and see that nothing of it stays, break that and read the fluent, wrong story
# that comes of it, see why V1 keeps a second copy of its input preparation for this, count what must be compiled, follow
# a measured profile to the number of KV blocks, and change R and L to see whose bytes grow.
# **You need** no GPU; 20 minutes. Words that are new to you are in [GLOSSARY.md](../GLOSSARY.md).
# **Live**; without a GPU the device's memory is modelled: it holds the buffers that are the device's, and nothing else.
#
# ## 1. A batch of nobody
#
# An engine must run a step before it has a request: to measure memory, to compile kernels, to capture graphs, and later to
# keep other ranks company. MRV2 has no second path for that. It *fabricates* the part of a step that the host knows, and
# sends it through the same `execute_model` as any other step:

# %%
import numpy as np
import pandas as pd
from IPython.display import display

from mrv2lab import Engine, SamplingParams
from mrv2lab.runner.dummy import fabricate

pd.set_option("display.max_colwidth", None)
host = fabricate(7, 3, max_num_reqs=8, max_model_len=256)
print(f"ids {host.req_ids}\nrows {host.rows}\ntokens {host.num_scheduled_tokens}\nstarts {host.query_start_loc}")

# %% [markdown]
# Three requests share seven tokens, and their *rows* are -1: no row of any table. Everything else follows on the device.
# Three real requests decode; then a dummy run of the same shape; and what the input buffers held each time:

# %%
from mrv2lab.teach.memory_lesson import batch_inputs, changed, launch_table, launches, somebodys_row, state_hash

SMALL = {"num_blocks": 64, "max_num_reqs": 8, "max_model_len": 256, "progress": False}


def decoding(runner):
    """An engine in which three requests decode."""
    engine = Engine("tiny", runner, **SMALL)
    for prompt in ("Once upon a time", "The old clock", "A bird sat"):
        engine.submit(prompt, SamplingParams(max_tokens=100, ignore_eos=True))
    for _ in range(4):
        engine.step()
    return engine


mrv2 = decoding("mrv2")
real = launches(mrv2, mrv2.step)
shown = {"a real step": batch_inputs(mrv2, 3, 3)}
before = state_hash(mrv2)
nobodys = launches(mrv2, lambda: mrv2.worker.runner.dummy_run(3, 3))
shown["nobody's"] = batch_inputs(mrv2, 3, 3)
after = state_hash(mrv2)
pd.DataFrame(shown)

# %% [markdown]
# Slots are -1, so no key and no value is written. Block rows are the *null block* 0, so nobody's keys are read. And what
# outlives a step, hashed in front of the dummy run and behind it:

# %%
display(pd.DataFrame({"before": before, "after": after}).head(6))
print(f"{len(before)} tables hashed, the KV cache and the host's own among them; changed: {changed(before, after)}")

# %% [markdown]
# ## 2. What if one of them had a row?
#
# Row -1 looks like a detail. Here two requests run and end, a third one begins, and in front of every step comes a dummy
# run of 8 tokens. Then the same with a bug: nobody's request is in a row, first in one that was never used, then in
# those that the ended requests have left:


# %%
def story(row):
    tight = SMALL | {"num_blocks": 8, "max_num_reqs": 4, "max_model_len": 128}
    with Engine("tiny", enable_prefix_caching=False, **tight) as engine:
        engine.generate(["The dog", "A bird"], SamplingParams(max_tokens=40, ignore_eos=True))
        name = engine.submit("Once upon a time, there was a", SamplingParams(max_tokens=70, ignore_eos=True))
        while engine.has_work():
            with somebodys_row(row):
                engine.worker.runner.dummy_run(8, 1)
            engine.step()
        return engine.output(name).text


pd.DataFrame({"the third request's text": {f"row {row}": story(row) for row in (-1, 0, 2, 3)}})

# %% [markdown]
# A row is not cleared when its request ends (that is what makes MRV2's rows cheap). The blocks it names are somebody
# else's by now, and the dummy run wrote into them. No error; the wrong stories read well. And row 0, which nobody ever had,
# is fine today: the bug waits for load. (In vLLM #49757 a dummy run wrote through stale block rows.)
#
# ## 3. V1: the same jobs, a second copy
#
# What was launched by the two steps of section 1, and by the same two steps of the V1 runner:

# %%
v1 = decoding("v1")
v1_real = launches(v1, v1.step)
before = state_hash(v1)
v1_nobodys = launches(v1, lambda: v1.worker.runner.dummy_run(3, 3))
print("V1: changed:", changed(before, state_hash(v1)))
display(launch_table(step=real, dummy_run=nobodys).rename_axis("MRV2"))
display(launch_table(step=v1_real, dummy_run=v1_nobodys).rename_axis("V1"))

# %% [markdown]
# In MRV2's table the dummy run is the step up to the hidden states, launch by launch; nothing is sampled. V1's dummy run
# has launches that no step has, and lacks those that make a step: it is a *copy of the input preparation, kept by hand*.
# Whatever a step learns, the copy must learn too (#34866, #34619 and #35137 are about a copy that had not). vLLM's
# `_dummy_run` serves all of these, by flags:
#
# | job | V1 | MRV2 |
# |---|---|---|
# | memory profile | `_dummy_run` of all tokens, then `_dummy_sampler_run` | a fabricated batch through `execute_model` |
# | compile, tune, warm up | `_dummy_run` at each size | small real requests, then fabricated batches |
# | warm up and capture each graph | `_dummy_run`; the capture hides in the model's wrapper | a path of its own |
# | empty step of an idle rank | `_dummy_run` | a fabricated batch |
# | drafter, LoRA, load balancing | more flags | the same call |
#
# ## 4. Warm-up: what must be compiled
#
# Triton compiles a kernel when it is first launched, and *anew* when an integer argument is of another class: equal to 1, a
# multiple of 16, or any other. The first real request must meet none of that. So the warm-up runs small requests of
# every kind that has launches of its own, one, three and sixteen at a time, and then nobody's batches of every size.
# (On a GPU the cell takes minutes: it compiles.)

# %%
from mrv2lab.engine.warm_up import COUNTS, mixes
from mrv2lab.teach.memory_lesson import compilations, kernels_to_compile

kinds = [mix.name for mix in mixes(mrv2.config.model.vocab_size)]
print(f"{len(kinds)} kinds: {', '.join(kinds)}; counts {COUNTS}")
display(kernels_to_compile(range(1, 65)))
with Engine("tiny", **SMALL) as engine:
    before = state_hash(engine)
    with compilations(engine) as compiled:
        cost = engine.warm_up(progress=False)
    known = [name for name in before.index if name in state_hash(engine).index]
    print(cost)
    print("changed:", changed(before[known], state_hash(engine)[known]), "  kernels compiled:", len(compiled))
    with compilations(engine) as late:
        params = SamplingParams(max_tokens=4, temperature=0.8, top_p=0.9, logprobs=2, repetition_penalty=1.1, seed=1)
        engine.generate(["The dog", "One night", "Tom had a"], params)
    print(
        "compiled by the first real requests:", len(late), "" if compiled else "(this machine runs specs, no kernels)"
    )

# %% [markdown]
# These are real requests through a scheduler of their own; tables and KV blocks get their contents back afterwards, hence the
# empty list. (Users of vLLM met compilations at their first real request: #43009, #48809. Its warm-up does the same, and a
# monitor reports what compiles later.)
#
# ## 5. From a profile to KV blocks
#
# How large may the KV cache be? Too small wastes the GPU, too large is an out-of-memory error hours later, at the
# first full batch. So it is *measured*: warm up (on a CPU one batch with every wish, since nothing compiles), run nobody's
# batch of `max_num_batched_tokens` (on a GPU), look at the peak.
# Here the device is given 64 MiB:

# %%
from mrv2lab.teach.profile_pictures import profile_picture
from mrv2lab.teach.sampling_pictures import STATIC

ROOM = {"max_num_reqs": 4, "max_num_batched_tokens": 64, "max_model_len": 128, "progress": False}
DEVICE = {"device": "cpu", "memory_bytes": 64 << 20}
sizes = {}
for share in (0.5, 0.9):
    with Engine("tiny", num_blocks=None, gpu_memory_utilization=share, **DEVICE, **ROOM) as engine:
        sizes[f"{share}"] = engine.worker.kv_cache_config
size = sizes["0.9"]
print(size)
profile_picture(sizes, "64 MiB: what a profile leaves for the KV cache").show(config=STATIC)

# %% [markdown]
# On a GPU two more parts show: the temporaries of the largest step, and graphs, which are captured only once the KV cache
# is there and are estimated before. With `device="cuda"` the same line measures the real one. And one block more?

# %%
for asked in ({"num_blocks": size.num_blocks + 1}, {"num_blocks": None, "gpu_memory_utilization": 0.05}):
    try:
        Engine("tiny", **asked, **DEVICE, **ROOM)
    except ValueError as error:
        print("refused:", error, "\n")

# %% [markdown]
# Refused at start, with the reason and the largest number that fits, instead of an out-of-memory error later.
#
# ## 6. The ledger: whose bytes are these?
#
# Every table has a formula over R (rows), L (tokens of a request), T (tokens of a step), V (vocabulary), K (drafts). The
# ledger holds each formula against the buffer that is really there, and finds no byte more or less:

# %%
from mrv2lab.check.memory_ledger import growth, measure, predict

with Engine("tiny", num_blocks=64) as fresh:
    ledger = measure(fresh)
top = ledger.state().rows.sort_values("requested", ascending=False).head(8)
display(top[["table", "formula", "place", "requested", "expected", "rounded"]].set_index("table"))
print(f"{len(ledger.rows)} tables; those that disagree with their formula:", ledger.problems[:3] or "none")

# %% [markdown]
# *rounded* is what PyTorch's allocators take for it on a GPU machine. A formula needs no engine. So here is a larger one
# that nobody builds: Qwen3-0.6B's shape. **Change R and L** and run the cell again.

# %%
import dataclasses

from mrv2lab.config import QWEN3_0_6B, EngineConfig, RunnerConfig, SchedulerConfig
from mrv2lab.teach.memory_pictures import growth_picture, owners_picture

R, L = 1024, 4096
limits = SchedulerConfig(max_num_reqs=R, max_model_len=L, max_num_batched_tokens=2048)
config = EngineConfig(QWEN3_0_6B, scheduler=limits)
display((predict(config).state().by_place() / 1e6).round(1).rename_axis(f"MB, R = {R:,}, L = {L:,}"))
lengths = [L // 4, L // 2, L, 2 * L]
growth_picture(growth(config, "max_model_len", lengths), f"MRV2's tables, R = {R:,}").show(config=STATIC)

# %% [markdown]
# The longest table, every token of every request (R x L), is *UVA*: host memory that kernels read over the bus, a few
# tokens a step. So a larger L hardly touches the device. What grows there? R times a part of the vocabulary: what the
# sampler looks for its cuts in, and a grammar's bits. (Not in it: 0.6 GB of counts, which come with the first request that
# asks for a penalty; see [06_sampler](06_sampler.ipynb).)

# %%
growth_picture(growth(config, "max_num_reqs", [R // 4, R // 2, R, 2 * R]), f"MRV2's tables, L = {L:,}").show(
    config=STATIC
)
owners_picture(predict(config).state().by_owner(), most=8).show(config=STATIC)

# %% [markdown]
# V1 keeps the tokens in pageable host memory, sends what a step needs, and has nearly nothing on the device; it pays for
# that in host time at every step ([01_persistent_batch](01_persistent_batch.ipynb)). MRV2 buys a host that only queues:

# %%
others = {"MRV2": config, "V1": dataclasses.replace(config, runner=RunnerConfig(runner="v1", transfer="barrier"))}
both = {name: predict(one).state().by_place()["requested"] / 1e6 for name, one in others.items()}
drafts = predict(dataclasses.replace(config, spec=dataclasses.replace(config.spec, num_speculative_tokens=4)))
both["MRV2, K = 4 drafts"] = drafts.state().by_place()["requested"] / 1e6
pd.DataFrame(both).T.round(1).rename_axis("MB")

# %% [markdown]
# (`mrv2lab memory --model qwen3-0.6b-shape --max-num-reqs 1024` prints every line of it.)
#
# ## Exercises
#
# Fill in your answers instead of `None`, or repair what is wrong, and run the cell.
#
# **1. A block.** How many bytes does one KV block of Qwen3-0.6B take? `QWEN3_0_6B` has the numbers; a block holds 16 tokens.

# %%
from mrv2lab.teach.memory_exercises import check_block_bytes, check_counts, check_nobody, check_num_blocks, check_rows

check_block_bytes(config, None)

# %% [markdown]
# **2. How many?** `size.profile` has `total`, `utilization`, `tensors`, `other`, `step_peak`, `graphs` in bytes, and
# `size.bytes_per_block` is what one takes. How many blocks? (Do not read it off `size.num_blocks`.)

# %%
check_num_blocks(size, None)


# %% [markdown]
# **3. Nobody.** Rows and token counts of a dummy run. This one is plausible and wrong:


# %%
def make(num_tokens, num_reqs):
    rows = np.arange(num_reqs)
    counts = np.full(num_reqs, num_tokens // num_reqs)
    return rows, counts


check_nobody(make)

# %% [markdown]
# **4. Warm-up.** With which three numbers of requests must you warm up, so that no batch of 1 to 256 compiles anything?

# %%
check_counts((1, 2, 3))

# %% [markdown]
# **5. Rows.** The tables of Qwen3-0.6B's shape may take 64 MiB of the device at L = 4,096. What is the greatest R? (Section 6
# has the tools.)

# %%
check_rows(config, 4096, 64 << 20, None)

# %%
mrv2.close()
v1.close()
