"""No output ends in a bad word: where it ends in all of a word's tokens but the last, the last becomes impossible.

What counts is what the request has generated, and this step's drafts in front of the logits row; the prompt does not. A
word of one token is always impossible. Counterpart in vLLM: ``v1/worker/gpu/sample/bad_words.py``.
"""

from __future__ import annotations

from typing import Any

from mrv2lab.ops._op import jit, op

tl: Any = None


def bad_words_spec(
    logits: Any,
    expanded_idx_mapping: Any,
    local_pos: Any,
    logits_indices: Any,
    input_ids: Any,
    all_token_ids: Any,
    prompt_len: Any,
    total_len: Any,
    word_ids: Any,
    word_offsets: Any,
    num_words: Any,
    most_words: int,
) -> None:
    """logits [n, V] (any float type and row stride, columns adjacent) of last tokens become -inf.

    expanded_idx_mapping int32[n] -> row of all_token_ids int32[R, L], prompt_len and total_len int32[R], word_ids
    int32[R, 1024], word_offsets int32[R, 129] (word w is word_ids[offsets[w] : offsets[w + 1]], not empty) and
    num_words int32[R], at most most_words of them; < 0 = padding. local_pos int32[n]: how many drafts lie in front of
    the row, the last of them at logits_indices int64[n] of input_ids int32[t].
    """
    for row, index in enumerate(expanded_idx_mapping.tolist()):
        if index < 0 or not num_words[index]:
            continue
        last = int(logits_indices[row]) + 1
        generated = all_token_ids[index, int(prompt_len[index]) : int(total_len[index])].tolist()
        generated += input_ids[last - int(local_pos[row]) : last].tolist()
        ids, offsets = word_ids[index].tolist(), word_offsets[index].tolist()
        for word in range(int(num_words[index])):
            *head, token = ids[offsets[word] : offsets[word + 1]]
            if (not head or generated[-len(head) :] == head) and token < logits.shape[1]:
                logits[row, token] = float("-inf")


@jit
def bad_words_kernel(
    logits,
    stride,
    expanded_idx_mapping,
    local_pos,
    logits_indices,
    input_ids,
    all_token_ids,
    token_stride,
    prompt_len,
    total_len,
    word_ids,
    word_stride,
    word_offsets,
    offset_stride,
    num_words,
    vocab,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1)
    index = tl.load(expanded_idx_mapping + row).to(tl.int64)
    if index < 0:
        return
    if word >= tl.load(num_words + index):
        return
    start = tl.load(word_offsets + index * offset_stride + word)
    head = tl.load(word_offsets + index * offset_stride + word + 1) - start - 1
    drafts = tl.load(local_pos + row)
    prompt = tl.load(prompt_len + index)
    committed = tl.load(total_len + index) - prompt
    if head > committed + drafts:
        return
    ids = word_ids + index * word_stride + start
    # Generated token j is committed for j < committed, and this step's draft number j - committed behind that.
    first = committed + drafts - head
    first_draft = tl.load(logits_indices + row) - drafts + 1 - committed
    different = 0
    for begin in range(0, head, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        inside = i < head
        j = first + i
        old = inside & (j < committed)
        said = tl.load(all_token_ids + index * token_stride + prompt + j, mask=old, other=0)
        said = tl.where(old, said, tl.load(input_ids + first_draft + j, mask=inside & (j >= committed), other=0))
        wanted = tl.load(ids + i, mask=inside, other=0)
        different += tl.sum((inside & (said != wanted)).to(tl.int32), axis=0)
    token = tl.load(ids + head)
    if (different == 0) & (token < vocab):
        tl.store(logits + row * stride + token, float("-inf"))


@op(spec=bad_words_spec, kernel=bad_words_kernel, writes=("logits",), numpy=False)
def bad_words(
    kernel,
    logits,
    expanded_idx_mapping,
    local_pos,
    logits_indices,
    input_ids,
    all_token_ids,
    prompt_len,
    total_len,
    word_ids,
    word_offsets,
    num_words,
    most_words,
):
    n, vocab = logits.shape
    if n and most_words:
        kernel[(n, most_words)](
            logits, logits.stride(0), expanded_idx_mapping, local_pos, logits_indices, input_ids, all_token_ids,
            all_token_ids.stride(0), prompt_len, total_len, word_ids, word_ids.stride(0), word_offsets,
            word_offsets.stride(0), num_words, vocab, BLOCK=32, num_warps=1,
        )  # fmt: skip
