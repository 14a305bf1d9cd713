# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The worker and attention: one schedule, three backends
#
# **You will** see what a worker owns, read what three attention backends make of the same step, find out which of them a
# graph can hold, watch sliding-window layers let go of blocks, see how their layers share memory, and the race against
# vLLM.
# **You need** no GPU; 20 minutes. Words that are new to you are in [GLOSSARY.md](../GLOSSARY.md).
# **Live**; figures from an H200 come from a file that its cell names.
#
# ## 1. What a worker owns
#
# The scheduler knows requests and blocks, and no tensor. The *worker* has everything that lives on the device: the
# decoder with its weights, the KV tensors, and one of the two runners with its tables. Between the two goes one message a
# step.

# %%
import pandas as pd
from IPython.display import display

from mrv2lab import Engine, ModelConfig, SamplingParams
from mrv2lab.check.memory_ledger import measure

pd.set_option("display.max_colwidth", None)
# 4 layers, of which every second sees 24 tokens only; random weights. (The shipped model has full attention.)
MODEL = ModelConfig(
    vocab_size=512,
    hidden_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=128,
    max_position_embeddings=512,
    sliding_window=24,
    layer_types=("full_attention", "sliding_attention") * 2,
)
SIZES = {"num_blocks": 96, "block_size": 8, "max_num_reqs": 4, "max_model_len": 256, "progress": False}
engine = Engine(MODEL, **SIZES)
owners = measure(engine).by_owner().sum(axis=1).rename("bytes")
parts = {"weights": "(weights)", "a step's buffers": "(a step)", "KV tensors": "engine/worker.py"}
known = {name: int(owners[[part in owner for owner in owners.index]].sum()) for name, part in parts.items()}
print({**known, "the runner's tables": int(owners.sum()) - sum(known.values())})
print("attention backend here:", engine.worker.runner.forward_pass.builders[0].name)
print("KV cache:", engine.worker.kv_cache_config)

# %% [markdown]
# ## 2. One step, three metadata objects
#
# Request 0 has decoded for a while, request 1 comes in with a prompt of 13 tokens. This is the whole schedule of the step:

# %%
from mrv2lab.teach.attention_lesson import metadata_of_next_step
from mrv2lab.teach.attention_pictures import STATIC, pages_picture

first = engine.submit(list(range(1, 41)), SamplingParams(max_tokens=60, ignore_eos=True))
for _ in range(9):
    engine.step()
second = engine.submit(list(range(100, 113)), SamplingParams(max_tokens=60, ignore_eos=True))
full, sliding = metadata_of_next_step(engine)
schedule = engine.core.last_schedule
print("tokens:", schedule.num_scheduled_tokens, "  new:", [request.req_id for request in schedule.new])
print("block tables of the new one, one a group:", schedule.new[0].block_ids)

# %% [markdown]
# From it the runner makes one *common* record a KV-cache group, and the backend's *builder* turns that into what its kernels
# take. Here all three builders got the same record, that of the layers which see everything:

# %%
full.table

# %% [markdown]
# * **torch** is the definition, **triton** our kernels. Both read the padded block table and the lengths *on the device*, and
#   of the host they need little: a bound on the queries of a request, and triton whether to `split` a mixed step, whose
#   single queries then have a kernel of their own.
# * **flashinfer** wants the pages as one list with row pointers. Its plan is made *on the host* from lengths: the host knows
#   how many pages each request has (an upper bound while drafts are in flight), not which; the ids are laid out by a
#   kernel. (Its column is made by its real builder, with a stand-in for the library: it needs a GPU.)
#
# No builder reads a device tensor: it would stop the host until the device has caught up, in every step. The same as a
# picture, numbers are block ids:

# %%
pages_picture(full, 10).show(config=STATIC)

# %% [markdown]
# ## 3. Which of them can a graph hold?
#
# A graph freezes what the host decided at capture, and reads anew what lies on the device. So a backend says whether its
# attention may be captured for any lengths, and the table of shapes follows:

# %%
from mrv2lab.config import GraphConfig, RunnerConfig, SchedulerConfig
from mrv2lab.graphs import DispatchTable

graphs, limits = GraphConfig("full_and_piecewise", (1, 2, 4)), SchedulerConfig(4, 64, 64)
rows = {}
for backend, whole in {"triton": True, "flashinfer": False}.items():
    table = DispatchTable(graphs, limits, full_graphs=whole, backend=backend)
    rows[backend] = {"3 decodes": table.dispatch(3, 3, 1).reason, "a chunk of 4": table.dispatch(1, 4, 4).reason}
pd.DataFrame(rows)

# %% [markdown]
# And a backend that cannot run here says so, and what to do:

# %%
from mrv2lab import make_runtime
from mrv2lab.attention import make_backend
from mrv2lab.config import EngineConfig

for name in ("torch", "triton", "flashinfer"):
    try:
        config = EngineConfig(MODEL, scheduler=limits, runner=RunnerConfig(attention=name))
        made = make_backend(make_runtime(config.runner), config)
        print(f"{name}: runs here; whole graphs: {made.full_graphs}")
    except (ValueError, ImportError) as error:
        print(f"{name}: {error}")

# %% [markdown]
# ## 4. Sliding windows: a second KV-cache group
#
# A layer with a window of 24 never looks further back than 24 tokens, its own included. Its group has a block table of its
# own, and its metadata is of the same kind; the same step, for the sliding layers:

# %%
pages_picture(sliding, 10).show(config=STATIC)

# %% [markdown]
# Orange is behind the window. The device's table still has these entries, and nobody reads them: kernels start at the
# window, flashinfer's list leaves them out. The scheduler has given the blocks back already. Follow one request:

# %%
from mrv2lab.teach.window_pictures import grow, held, held_picture, tables_picture

NAMES = ["layers 0, 2: all tokens", "layers 1, 3: a window of 24"]
with Engine(MODEL, **SIZES) as alone:
    life = list(grow(alone, range(1, 21), max_tokens=60))
tables_picture(life, NAMES).show(config=STATIC)
held_picture(held(life), NAMES).show(config=STATIC)

# %% [markdown]
# Both tables stay equally long; what is let go becomes the *null block* 0. Blocks of a window go back to the pool while the
# request runs, so long requests cost the sliding group nothing more.
#
# ## 5. What a block costs, and who shares it
#
# Both groups take blocks from one pool, and a block belongs to one group at a time. So the i-th layer of one group and
# the i-th of the other can live in the same tensor:

# %%
import dataclasses

from mrv2lab.engine.kv_layout import kv_bytes_per_block, kv_tensor_of_layer

every = dataclasses.replace(MODEL, sliding_window=None, layer_types=())
unequal = dataclasses.replace(MODEL, layer_types=("full_attention", *("sliding_attention",) * 3))
shown = {"4 full": every, "2 full, 2 sliding": MODEL, "1 full, 3 sliding": unequal}
pd.DataFrame(
    {
        name: {
            "groups (layers)": [group.layers for group in model.kv_groups],
            "tensor of each layer": kv_tensor_of_layer(model),
            "bytes of a block": kv_bytes_per_block(EngineConfig(model, scheduler=limits)),
        }
        for name, model in shown.items()
    }
).T

# %% [markdown]
# Half the layers slide: a block costs half. With unequal groups the larger decides, and the smaller leaves a part of
# its blocks unused. How many blocks there are comes from a measured profile:
# [09_dummy_runs_and_memory](09_dummy_runs_and_memory.ipynb).
#
# ## 6. The race
#
# Ours beside vLLM's and transformers', the same requests, engines alternated round by round: **A** 256 requests of 128
# tokens, 256 more each; **B** one such request; **C** 64 requests of 1,024, 128 more each.

# %%
from mrv2lab.bench.engine_pictures import over_v1_picture, race_picture
from mrv2lab.bench.result import newest_result
from mrv2lab.teach.race_tables import losses, missing, ratios, runs

result = newest_result("h200-engine")
if result is None:
    print(
        "No race figures here: `mrv2lab bench engine --out FILE` on a GPU makes them, with every peer that is "
        "installed; the file belongs into mrv2lab/bench/results as DATE-h200-engine.json."
    )
else:
    figures = result["figures"]
    print(f"{result['machine']['gpu']}, {result['date'][:10]}, {figures['model']}", *missing(figures), sep="\n")
    race_picture(figures).show(config=STATIC)
    display(runs(figures))
    if len(ratios(figures)):
        display(ratios(figures))
for topic, graphs in (("h200-over-v1", "graphs cut at attention"), ("h200-full-over-v1", "one graph for any lengths")):
    if over := newest_result(topic):
        machine = over["machine"]
        print(f"MRV2 over V1, {graphs}, {machine['gpu']}, {over['date'][:10]}, commit {machine['commit']}")
        over_v1_picture(over["figures"]).show(config=STATIC)
        print(losses(over["figures"]))

# %% [markdown]
# How to read it: a difference inside the spread of the rounds is none; *resolved* says whether 1 lies outside of all
# rounds' ratios. In one process the host's work of scheduler and runner is serial; asynchronous scheduling overlaps it
# with the device only. Where one request decodes alone, the time goes into reading the weights, and a runner can gain
# nothing but launches. *Graphs* are `full_and_piecewise` and `full`: where requests come and go, pieces leave the host
# 28 launches of attention a step, and both runners wait for their own host.
#
# ## Exercises
#
# Each answer below is plausible and wrong, or missing. Run the cell, read the reason, repair it.
#
# **1. Pages.** Make flashinfer's list from lengths and block tables. `starts[j]` is where request j's pages begin.

# %%
import numpy as np

from mrv2lab.teach.attention_exercises import check_frozen, check_let_go, check_pages, check_tensors


def pages(seq_lens, query_lens, block_table, block_size, window):
    counts = seq_lens // block_size
    starts = np.concatenate([[0], np.cumsum(counts)])
    return starts, np.concatenate([row[:count] for row, count in zip(block_table, counts, strict=True)])


check_pages(pages, (full, sliding))

# %% [markdown]
# **2. Let go.** A query is at `position`. Which is the first entry of the block table that it sees?

# %%
check_let_go(lambda position, window, block_size: max(position - window, 0) // block_size)

# %% [markdown]
# **3. Frozen.** Which fields of triton's metadata would a graph freeze? Then the same for `"flashinfer"`.

# %%
check_frozen(full, "triton", None)

# %% [markdown]
# **4. Share.** Six layers: full, sliding, sliding, full, sliding, sliding. Which tensor does each one use?

# %%
six = dataclasses.replace(MODEL, num_hidden_layers=6, layer_types=("full_attention", *("sliding_attention",) * 2) * 2)
check_tensors(six, [0, 0, 0, 1, 1, 1])

# %%
engine.close()
