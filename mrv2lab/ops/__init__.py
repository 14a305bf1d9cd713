"""One file an operation, three parts each: spec (the definition) -> kernel (Triton) -> launcher. No torch at import.

Shared
    _op                  Op, jit, op: how the three parts become one object and how kernels are found
    _launch              launches without Triton's bookkeeping
    _pdl                 kernels that start before their predecessor has ended, and wait inside

State (integers; NumPy specs, bit-equal on every backend)
    apply_write          staged diffs into one table
    fused_apply_write    staged diffs into several tables at once
    post_update          sampled tokens and counters into the rows, after sampling

Inputs of a step (integers)
    prefill_inputs       prompt tokens of this step's chunks; the tokens behind them
    pos_seq_lens         positions and sequence lengths
    combine_tokens       last sampled and draft tokens; which rows need logits
    expand_idx_mapping   state row of every logits row
    gather_block_tables  block tables of the batch, from the permanent rows
    slot_mapping         where each token goes in the KV cache
    prepare_decode       what plain decodes need of these in one launch
    prepare_batch        the same for any batch without drafts
    page_indices         a batch's pages as one list, for backends that want it so
    num_sampled          how many sampled tokens count, how many drafts were rejected
    flat_pos_seq_lens    positions and sequence lengths, from V1's per-token arrays
    scatter_sampled      the previous step's tokens into V1's holes

Decoder (floats; torch specs)
    rms_norm, add_rms_norm   normalisation, alone and with the residual addition
    rotary               position embedding, with q/k norm where the model has it
    kv_write             keys and values into the paged cache
    paged_attention      causal attention over the paged cache
    decode_attention     the same for requests with one query, their keys cut into runs
    silu_mul             the gate of SwiGLU
    rotary_kv_write      rotary and kv_write in one kernel
  steps of few tokens, each weight read once (_matvec)
    norm_matvec          rms_norm and a product
    norm_matvec_silu     rms_norm, the gate and up products, silu_mul
    matvec_add           a product, added to the residual stream
    gather_matvec        logits of chosen rows
  steps of tens to hundreds of tokens
    small_mm             a product in small tiles, its sum split if need be
    small_mm_silu        the gate and up products with silu_mul
    sum_add_rms_norm     add_rms_norm over partial sums

Sampling
    grammar_mask         structured output's bits on raw logits
    nan_count            NaN logits of each row
    cast_logits          the float32 copy that the stages edit
    logit_bias           allowed ids, bias, stop ids held back
    count_tokens         tokens of prompt and output, counted on the device
    penalties            repetition, frequency, presence
    output_tokens        generated tokens in one piece, for custom processors
    bad_words            sequences that no output may contain
    temperature          logits over temperature
    min_p                a threshold below the best logit
    top_k_top_p          the cut of top-k and top-p without a sort (logit_groups, cut_from_groups, narrow_cut,
                         list_near, search_cut find it)
    topk_ids, logprobs   the likeliest tokens, and log-probabilities of the chosen only
    noise                counter-based hash, uniforms and Gumbel noise
    argmax               greedy choice
    gumbel, gumbel_cut   sampling by Gumbel-max, of all tokens or those that a cut keeps

Looking
    checksum             64 bits of a table's valid cells
    spin                 time, and nothing else
"""
