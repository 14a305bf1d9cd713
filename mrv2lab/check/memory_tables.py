"""The lines of the memory ledger: every table of the model's side and of either runner. Vocabulary: memory_formulas."""

from __future__ import annotations

from collections.abc import Iterator

from mrv2lab.check.memory_formulas import Line, Writer, growing, late
from mrv2lab.config import EngineConfig
from mrv2lab.graphs.dispatch import resolve_mode
from mrv2lab.model.products import Products


def lines_of(config: EngineConfig) -> list[Line]:
    """Every table that an engine of ``config`` has, or may come to have."""
    own = mrv2_lines if config.runner.runner == "mrv2" else v1_lines
    return [*model_lines(config), *attention_lines(config), *kv_lines(config), *own(config)]


def model_lines(config: EngineConfig) -> Iterator[Line]:
    """Weights, and the decoder's buffers of one step."""
    model = config.model
    dtype, count = model.dtype, model.num_hidden_layers
    weights = Writer("model/decoder.py (weights)", "", config)
    yield weights.plain("model.embed_tokens.weight", f"V x H {dtype}")
    yield weights.plain("model.norm.weight", f"H {dtype}")
    if not model.tie_word_embeddings:
        yield weights.plain("lm_head.weight", f"V x H {dtype}")
    for layer in range(count):
        shapes = {
            "input_layernorm": "H",
            "self_attn.q_proj": "(Hq + 2 * Hk) x D x H",  # with k and v below it
            "self_attn.o_proj": "H x Hq x D",
            "post_attention_layernorm": "H",
            "mlp.gate_proj": "2 x I x H",  # with up below it
            "mlp.down_proj": "H x I",
        }
        if model.qk_norm:
            shapes |= {"self_attn.q_norm": "D", "self_attn.k_norm": "D"}
        for name, shape in shapes.items():
            yield weights.plain(f"model.layers.{layer}.{name}.weight", f"{shape} {dtype}")
    step = Writer("model/decoder.py (a step)", "", config)
    yield from step.devices({"rope.cos": "positions x D / 2 float32", "rope.sin": "positions x D / 2 float32"})
    widths = {
        "hidden": "H", "residual": "H", "qkv": "(Hq + 2 * Hk) x D", "attn_out": "Hq x D", "gate_up": "2 x I",
        "act": "I",
    }  # fmt: skip
    yield from step.devices({name: f"T x {width} {dtype}" for name, width in widths.items()})
    yield from step.devices({"logits_in": f"n x H {dtype}", "logits": f"n x V {dtype}"})
    partials = Products("triton", model).partials_shape
    if partials is not None:  # specs and the interpreter split no product
        yield from late("compiled kernels", [step.plain("partials", f"{partials[0]} x {partials[1]} x H float32")])


def attention_lines(config: EngineConfig) -> Iterator[Line]:
    """What a backend has of its own; its library may have more, which no runtime knows of."""
    own = Writer("attention/triton_backend.py", "", config)
    scratch = {
        "partial": "8192 * Hq / Hk x D float32", "partial_lse": "8192 * Hq / Hk float32", "counters": "8192 int32",
    }  # fmt: skip
    if config.runner.attention in ("auto", "triton"):
        yield from late("attention by Triton kernels", own.devices(scratch, "attention."))
    if config.runner.attention != "flashinfer":
        return
    own = Writer("attention/flashinfer_backend.py", "", config)
    yield own.plain("flashinfer.workspace", "")
    plans = max(config.runner.pool_depth, config.scheduler.max_concurrent_steps) + 1
    for g in range(len(config.model.kv_groups)):
        yield own.plain(f"flashinfer.{g}.page_indices", "R x ceil(L / B) int32")
        yield own.plain(f"flashinfer.{g}.page_rows", "(2 * R + 1) int32")
        for plan in range(g * plans, (g + 1) * plans):
            yield own.plain(f"flashinfer.staging.{plan}", "(2 * R + 1) int32", "pinned")


def kv_lines(config: EngineConfig) -> Iterator[Line]:
    """Keys and values; the i-th layers of all groups share a tensor."""
    write = Writer("engine/worker.py", "", config)
    for i in range(max(len(group.layers) for group in config.model.kv_groups)):
        for name in ("key_cache", "value_cache"):
            yield write.plain(f"{name}.{i}", f"blocks x B x Hk x D {config.model.dtype}")


# -- MRV2 --------------------------------------------------------------------------------------------------------------
def mrv2_lines(config: EngineConfig) -> Iterator[Line]:
    """Rows that stay, their block tables, a step's inputs, the sampler's state, and what comes back."""
    policy, groups = config.runner.transfer, range(len(config.model.kv_groups))
    rows = Writer("state/request_state.py", policy, config)
    drafts = "K" if config.spec.num_speculative_tokens else "1"
    yield rows.plain("all_token_ids", "R x L int32", "uva")
    yield from rows.table("prompt_len", "R int32")
    yield from rows.table("prefill_len", "R int32")
    yield from rows.devices({
        "total_len": "R int32", "num_computed_tokens": "R int32", "request_state.pointers": "3 uint64",
        "request_state.strides": "3 int64",
    })  # fmt: skip
    yield from rows.diffs("request_state", "(3 * R)", "int32", ["1", "1"])
    yield rows.plain("last_sampled_tokens", "R int64")
    yield from rows.staged("draft_tokens", f"R x {drafts} int64")
    yield rows.plain("next_prefill_tokens", f"{drafts} x R int32")
    for name in ("num_computed_tokens_np", "num_computed_prefill_tokens"):
        yield rows.plain(f"req_states.{name}", "R int32", "host")

    blocks = Writer("state/block_tables.py", policy, config)
    for g in groups:
        yield blocks.plain(f"block_table.{g}", "R x ceil(L / B) int32")
        yield blocks.plain(f"input_block_table.{g}", "R x ceil(L / B) int32")
    yield from blocks.table("num_blocks", "G x R int32")
    yield from blocks.devices({
        "slot_mappings": "G x T int64", "block_sizes": "G int32", "input_table.pointers": "G uint64",
        "block_tables.pointers": "G uint64", "block_tables.strides": "G int64",
    })  # fmt: skip
    yield from blocks.diffs("block_tables", "(G * R)", "int32", ["ceil(L / B)"] * (len(groups) - 1))

    inputs = Writer("state/input_batch.py", policy, config)
    yield from inputs.devices({
        "input_ids": "T int32", "positions": "T int64", "seq_lens": "R int32", "logits_indices": "n int64",
        "expanded_idx_mapping": "n int32", "expanded_local_pos": "n int32", "first_pos": "n int32",
        "arange": "(R + 1) int32",
    })  # fmt: skip
    for name, formula in {"idx_mapping": "R", "query_start_loc": "(R + 1)", "cu_num_logits": "(R + 1)"}.items():
        yield from inputs.upload(name, f"{formula} int32")
    if config.runner.fused_prepare:
        yield from inputs.staging("batch", "(4 * ceil(R / 4) + R + 1) int32")
    yield from _sampler_lines(config, policy)

    back = Writer("runner/async_output.py", policy, config)
    for slot in range(config.scheduler.max_concurrent_steps):
        yield from back.returned(f"sampled.{slot}", "R x (K + 1) int64")
        yield from back.returned(f"num_sampled.{slot}", "R int32")
    yield Writer("runner/model_runner.py", policy, config).plain("num_rejected", "R int32")
    extras = Writer("runner/sample_output.py", policy, config)
    for slot in range(config.scheduler.max_concurrent_steps):
        yield from late("count_nans", extras.returned(f"num_nans.{slot}", "n int32"))
        for name, most in {"logprobs": "n", "prompt_logprobs": "T"}.items():
            for part, formula in _returned_logprobs(most).items():
                yield from late(f"a request with {name}", extras.returned(f"{name}.{slot}.{part}", formula))


def _returned_logprobs(rows: str) -> dict[str, str]:
    """A token itself and up to 32 others."""
    size = f"{rows} x (min(32, V) + 1)"
    return {"ids": f"{size} int32", "values": f"{size} float32", "ranks": f"{rows} int32"}


def _sampler_lines(config: EngineConfig, policy: str) -> Iterator[Line]:
    state = Writer("sample/sampling_state.py", policy, config)
    for name, dtype in {
        "temperature": "float32", "seeds": "int64", "top_k": "int32", "top_p": "float32", "log_min_p": "float32",
    }.items():  # fmt: skip
        yield from state.table(name, f"R {dtype}")
    penalties = Writer("sample/penalties.py", policy, config)
    for name in ("repetition_penalty", "frequency_penalty", "presence_penalty"):
        yield from penalties.table(name, "R float32")
    yield from penalties.staging("penalties.rows", "64 int32")
    counts = {"prompt_bin_mask": "R x ceil(V / 32) int32", "output_bin_counts": "R x V int32"}
    yield from late("a request with penalties", penalties.devices(counts))
    bias = Writer("sample/logit_bias.py", policy, config)
    for name, formula in {
        "allowed_ids": "R x 1024 int32", "bias_ids": "R x 1024 int32", "bias_values": "R x 1024 float32",
        "stop_ids": "R x 128 int32",
    }.items():  # fmt: skip
        yield from bias.staged(name, formula)
    yield from bias.table("logit_edits", "R x 5 int32")
    bad = Writer("sample/bad_words.py", policy, config)
    yield from bad.staged("bad_word_ids", "R x 1024 int32")
    yield from bad.staged("bad_word_offsets", "R x 129 int32")
    yield from bad.table("num_bad_words", "R int32")
    custom = Writer("sample/custom.py", policy, config)
    yield from custom.upload("custom.starts", "64 int32")
    yield from custom.upload("custom.rows", "64 int32")
    scratch = {"custom.row": "V float32", "custom.tokens": "2048 int32"}
    yield from late("a request with a custom processor", custom.devices(scratch))
    grammar = Writer("sample/grammar.py", policy, config)
    yield from grammar.upload("grammar_bitmask", "n x ceil(V / 32) int32")
    yield from grammar.upload("grammar_mapping", "n int32")
    cuts = Writer("sample/top_k_top_p.py", policy, config)
    yield from _cut_lines(cuts, "top_k_top_p", listed="512", candidates="1024", sums="ceil(V / 2048)")
    yield from cuts.devices({"top_k_top_p.rows": "n int32", "top_k_top_p.tokens": "n int64"})
    yield Writer("sample/min_p.py", policy, config).plain("min_p.local_max", "n x ceil(V / 4096) float32")
    yield Writer("sample/min_p.py", policy, config).plain("min_p.group_max", "n x ceil(V / 128) float32")
    yield Writer("sample/min_p.py", policy, config).plain("min_p.cut", "n float32")
    top = Writer("sample/logprobs.py", policy, config)
    most = "4 * (min(32, V) + 1)"
    yield from _cut_lines(top, "logprobs", listed=most, candidates=most, sums="0")
    yield from top.devices({"logprobs.rows": "n int32", "logprobs.ones": "n float32"})
    yield from top.upload("logprobs.plan", "3 * n int32")
    prompt = Writer("sample/prompt_logprobs.py", policy, config)
    yield from prompt.upload("prompt_logprobs.plan64", "2 * T int64")
    yield from prompt.upload("prompt_logprobs.plan32", "2 * T int32")
    sampler = Writer("sample/sampler.py", policy, config)
    yield sampler.plain("local_max", "")
    yield sampler.plain("local_arg", "")
    yield from late(_EDITED, [sampler.plain("processed_logits", "n x V float32")])


_EDITED = "a request whose logits are edited"


def _cut_lines(write: Writer, name: str, listed: str, candidates: str, sums: str) -> Iterator[Line]:
    """``sample/cut_buffers.py``: what finding a cut in rows of logits needs."""
    for part, formula in {
        "cut_value": "n float32", "cut_id": "n int32", "status": "n int32", "bounds": "n x 6 float32",
        "group_max": "n x ceil(V / 128) float32", "block_max": "n x ceil(V / 2048) float32",
        "block_sum": "n x ceil(V / 2048) float32", "block_count": "n x ceil(V / 2048) int32",
        "sums": f"n x {sums} x 8 float32", "near": f"n x {sums} x 64 int32", "near_count": f"n x {sums} int32",
        "listed": f"n x min({listed}, ceil(V / 128)) int32",
        "candidates": f"n x pow2(min({candidates}, V + 1)) int32",
    }.items():  # fmt: skip
        yield write.plain(f"{name}.{part}", formula)


# -- V1 ----------------------------------------------------------------------------------------------------------------
def v1_lines(config: EngineConfig) -> Iterator[Line]:
    """The persistent batch on the host, its copies, a step's inputs, and what comes back."""
    policy, fresh = config.runner.transfer, "pinned_copy"
    batch = Writer("runner_v1/persistent_batch.py", policy, config)
    yield batch.plain("input_batch.token_ids_cpu", "R x L int32", "host")
    yield batch.plain("input_batch.num_tokens_no_spec", "R int32", "host")
    yield batch.plain("input_batch.num_prompt_tokens", "R int32", "host")
    yield from batch.table("num_computed_tokens", "R int32")
    yield from batch.table("temperature", "R float32")
    pool = policy == "uva_pool"
    attention = config.runner.attention
    mode, _ = resolve_mode(config.graphs.cudagraph_mode, attention != "flashinfer", attention)
    moves = pool and mode != "none"  # a graph reads one address, so no slots in turn
    for g in range(len(config.model.kv_groups)):
        table = Writer("runner_v1/block_table.py", fresh if moves else policy, config)
        yield from table.table(f"block_table.{g}", "R x ceil(L / B) int32")
        if pool and not moves:
            yield from late("a dummy run", [table.plain(f"block_table.{g}.nobody", "R x ceil(L / B) int32")])
        yield table.plain(f"input_batch.block_table.groups.{g}.num_blocks_per_row", "R int32", "host")
    inputs = Writer("runner_v1/prepare.py", policy, config)
    for name, formula in {
        "input_ids": "T int32", "query_start_loc": "(R + 1) int32", "req_indices": "T int64", "query_pos": "T int64",
        "num_scheduled_tokens": "R int32", "discard_request_mask": "R bool",
    }.items():  # fmt: skip
        yield from inputs.upload(name, formula)
    yield from inputs.devices({
        "positions": "T int64", "seq_lens": "R int32", "logits_indices": "R int64", "slot_mappings": "G x T int64",
        "identity": "R int32", "block_table.strides": "G int64", "block_sizes": "G int32",
    })  # fmt: skip
    yield from inputs.upload("token_indices", "R int64", fresh)
    yield from inputs.upload("prev_rows", "R int64", fresh)
    # The addresses of all groups' tables, once for each slot that they have been in.
    sets = "min(m, P)" if pool and not moves else "min(m, 1)"
    pointers = [inputs.plain("block_table.pointers", f"{sets} x G uint64")]
    yield from late("a step", growing("inputs._pointers", pointers))
    yield from _v1_sampling_lines(config, policy, fresh)
    prompt = Writer("runner_v1/prompt_logprobs.py", policy, config)
    yield from prompt.upload("prompt_logprobs.indices", "T int64", fresh)
    yield from prompt.upload("prompt_logprobs.tokens", "T int64", fresh)
    back = Writer("runner_v1/async_output.py", policy, config)
    for slot in range(config.scheduler.max_concurrent_steps):
        yield from back.returned(f"sampled.{slot}", "R int64")
        yield from back.returned(f"num_nans.{slot}", "R int32")
        where = f"outputs._slots.{slot}.logprobs"
        for part, dtype, most in (
            ("ids", "int32", "_size"),
            ("values", "float32", "_size"),
            ("ranks", "int32", "_rows"),
        ):
            both = back.returned(f"logprobs.{slot}.{part}", f"m {dtype}")
            yield from late("a request with logprobs", growing(f"{where}.{most}", both))


def _v1_sampling_lines(config: EngineConfig, policy: str, fresh: str) -> Iterator[Line]:
    """What the sampler reads. Some of it V1 sends sparse, in arrays that grow from one element to the next power of two
    that holds what the requests of a batch ask for."""
    for owner, where, arrays in (
        ("penalties", "sampler.stages._outputs", {"output_token_ids": ("_upload", "int64")}),
        ("sampling_metadata", "metadata", {
            "prompt_token_ids": ("_prompts", "int64"), "logit_bias.rows": ("_bias_rows", "int64"),
            "logit_bias.ids": ("_bias_ids", "int64"), "logit_bias.values": ("_bias_values", "float32"),
        }),
        ("logits_stages", "sampler.stages", {
            "min_tokens.rows": ("_stop_rows", "int64"), "min_tokens.ids": ("_stop_ids", "int64"),
        }),
        ("grammar", "grammar", {"grammar.rows": ("_rows", "int64"), "grammar.bitmask": ("_mask", "int32")}),
    ):  # fmt: skip
        sparse = Writer(f"runner_v1/{owner}.py", policy, config)
        for name, (attribute, dtype) in arrays.items():
            lines = sparse.upload(name, f"pow2(m) {dtype}", fresh)
            yield from growing(f"{where}.{attribute}.longest", lines)
    rows = Writer("runner_v1/sampling_rows.py", policy, config)
    for name, dtype in {"top_k": "int32", "top_p": "float32", "min_p": "float32"}.items():
        yield from late(f"a request with {name}", rows.table(name, f"R {dtype}"))
    for name in ("repetition_penalty", "frequency_penalty", "presence_penalty"):
        yield from late("a request with penalties", rows.table(name, "R float32"))
    masks = Writer(rows.owner, fresh, config)
    yield from late("a request with allowed_token_ids", masks.table("allowed_token_ids_mask", "R x V bool"))
    stages = Writer("runner_v1/logits_stages.py", policy, config)
    yield from late(_EDITED, [stages.plain("processed_logits", "R x V float32")])
