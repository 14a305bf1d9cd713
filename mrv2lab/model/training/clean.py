"""From a raw reply to a training document: joins, cuts off loops, drops what is not a story."""

from __future__ import annotations

import re

from .prompts import Prompt

SENTENCE = re.compile(r".+?[.!?]+\"?(?=\s|$)\s*|.+$", re.S)
ENDS_WELL = re.compile(r"[.!?]\"?$")
UNWANTED = re.compile(
    r"\b(the|this|our|short) (story|talk|tale|dialogue)\b|\bassistant\b|\bAI\b|\bSmolLM\b|language model|Hugging"
    r"|\bsure!|\bhere is a\b|\bhere's a\b|once upon a time.{20,}once upon a time|https?|\.com\b|www"
    r"|\d\d|\d\.|--|__|[*#<>{}\[\]|\\=+_/^~`@$%&]",
    re.I | re.S,
)
MIN_WORDS, MIN_WORDS_ANSWER = 35, 8


def document(prompt: Prompt, reply: str, finished: bool) -> str | None:
    """The document of a reply, or None if it is not worth keeping.

    A reply that loops, or that ran out of tokens, is cut after its last good paragraph (or sentence).
    """
    reply = re.sub(r"\s*\n\s*", "\n", reply)
    text = prompt.opening + reply if prompt.opening else f"{prompt.header} {reply.strip()}".strip()
    text = re.sub(r"[ \t]+", " ", text).strip()
    head = len(prompt.header)
    good = _until_loop(text, head)
    if good < len(text) or not finished:
        text = _cut_at_end(text[:good], head)
    body = text[head:]
    if len(body.split()) < (MIN_WORDS_ANSWER if prompt.header else MIN_WORDS):
        return None
    if prompt.header and not body.strip()[0].isupper():
        return None
    if not text.isascii() or UNWANTED.search(body) or not ENDS_WELL.search(text) or text.count('"') % 2:
        return None
    return text


def distinct(text: str, n: int = 4) -> float:
    """The share of distinct runs of `n` words: 1 when nothing is said twice."""
    words = text.lower().split()
    runs = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    return len(set(runs)) / max(len(runs), 1)


def _until_loop(text: str, start: int) -> int:
    """Where `text` begins to repeat itself: a sentence already said, or one made of trigrams already used."""
    said: set[str] = set()
    trigrams: set[tuple[str, ...]] = set()
    for match in SENTENCE.finditer(text, start):
        words = re.findall(r"[a-z']+", match.group().lower())
        own = [tuple(words[i : i + 3]) for i in range(len(words) - 2)]
        key = " ".join(words)
        old = sum(t in trigrams for t in own)
        twice = len(own) - len(set(own))
        if (len(words) > 2 and key in said) or (len(own) > 3 and old > 0.5 * len(own)) or twice > 2:
            return match.start()
        said.add(key)
        trigrams.update(own)
    return len(text)


def _cut_at_end(text: str, start: int) -> str:
    """Cuts back to a paragraph's end if that keeps 60% of the text, else to a sentence's, with quotes closed."""
    ends = [m.start() + len(m.group().rstrip()) for m in SENTENCE.finditer(text, start)]
    ends = [e for e in ends if ENDS_WELL.search(text[:e]) and text.count('"', 0, e) % 2 == 0]
    paragraphs = [e for e in ends if text[e : e + 1] == "\n" and e > 0.6 * len(text)]
    best = (paragraphs or ends or [start])[-1]
    return text[:best].rstrip()
