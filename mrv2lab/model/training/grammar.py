"""The project's own story grammar: short, firm stories and right answers, to be mixed with the teacher's text.

A story is an opening, a few words about the hero, and one plot of plots.txt or plots2.txt, whose beats are
filled with names, creatures, things, and places that stay the same to the end. facts.txt holds the answers.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .grammar_words import (
    ADJECTIVES,
    ANIMALS,
    BOYS,
    COLORS,
    GIRLS,
    HOMES,
    LIKES,
    NUMBERS,
    PLACES,
    SEASONS,
    THINGS,
    TIMES,
    TRAITS,
    WEATHERS,
    WEEKDAYS,
    people,
)

HERE = Path(__file__).parent
SHE = {"he": "she", "him": "her", "his": "her"}
HE = {"he": "he", "him": "him", "his": "his"}
IT = {"he": "it", "him": "it", "his": "its"}
FACT_SHARE = 0.12
SEATS = ("on a fence", "{p}", "on a big stone", "under a tree", "in the sun", "on a bench", "in the grass")
OF_OLD_THINGS = tuple("old old old old little small broken rusty red green blue white dusty gray".split())
# Vowels in writing that are none in speech, and the other way round.
AN = re.compile(r"\b([Aa]) (?=[aeiouAEIOU]|honest|hour)(?!uni|use|eu|one\b|[Aa]nd\b|is\b)")
START = re.compile(r"^[a-z]|(?<=[.!?] )[a-z]")


@dataclass(frozen=True)
class Plot:
    """One plot: `needs` says how the hero comes to it, `beats` holds the alternatives of every sentence."""

    name: str
    # any: nothing; had, found: the object `o`; go: a friend who asks where to; it: the hero is the object
    needs: str
    objects: tuple[str, ...]
    adjectives: tuple[str, ...]
    beats: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Table:
    """Questions and answers with {0}, {1}, ... for the words of a row."""

    questions: tuple[str, ...]
    answers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def read_plots(text: str) -> list[Plot]:
    """Parses the notation that the head of plots.txt explains."""
    plots: list[Plot] = []
    for block in re.split(r"^# ", text, flags=re.M)[1:]:
        head, *lines = block.strip().splitlines()
        match = re.fullmatch(r"(\S+) (any|had|found|go|it)(?: o=(.+?))?(?: adj=(.+))?", head)
        if match is None or not lines:
            continue  # a comment
        name, needs, objects, adjectives = match.groups()
        plots.append(
            Plot(
                name,
                needs,
                tuple(objects.split(",")) if objects else THINGS,
                tuple(adjectives.split(",")) if adjectives else OF_OLD_THINGS if needs == "it" else ADJECTIVES,
                tuple(tuple(line.strip().split(" | ")) for line in lines),
            )
        )
    return plots


def read_facts(text: str) -> list[Table]:
    """Parses facts.txt."""
    tables: list[Table] = []
    for block in re.split(r"^\? ", text, flags=re.M)[1:]:
        head, *rows = block.strip().splitlines()
        questions, answers = head.split(" => ")
        cells = tuple(tuple(row.split(" = ")) for row in rows)
        tables.append(Table(tuple(questions.split(" | ")), tuple(answers.split(" | ")), cells))
    return tables


PLOTS = read_plots((HERE / "plots.txt").read_text()) + read_plots((HERE / "plots2.txt").read_text())
FACTS = read_facts((HERE / "facts.txt").read_text())


def polish(text: str) -> str:
    """Makes "a owl" "an owl" and puts a capital at the start of `text` and behind every full stop."""
    text = AN.sub(r"\1n ", text)
    return START.sub(lambda m: m.group().upper(), text)


class Cast:
    """Who and what a story is about; `slots` fills the {...} of a beat."""

    def __init__(self, rng: random.Random, plot: Plot) -> None:
        self.rng, self.plot = rng, plot
        self.slots: dict[str, str] = {}
        used: set[str] = set()
        kinds: set[str] = set()
        animal_story = rng.random() < 0.55
        for i, who in enumerate("XYZ"):
            girl = rng.random() < 0.5
            names = [n for n in (rng.choice(GIRLS if girl else BOYS) for _ in range(9)) if n[:2] not in used]
            self.slots[who] = names[0]
            used.add(names[0][:2])
            self._pronouns(SHE if girl else HE, str(i + 1) if i else "")
            kind = "X"
            while kind == "X" or kind in kinds:
                kind = rng.choice(ANIMALS if animal_story == (rng.random() < 0.85) else people(girl))
            kinds.add(kind)
            self.slots["k" + (str(i + 1) if i else "")] = kind
        (self.slots["P"], self.slots["p"]), (self.slots["Q"], self.slots["q"]) = rng.sample(PLACES, 2)
        self.slots |= {"to P": "to " + self.slots["P"], "to Q": "to " + self.slots["Q"]}
        self.noun = rng.choice(plot.objects)
        self.slots["o"] = self.noun
        if plot.adjectives != ADJECTIVES or (" " not in self.noun and rng.random() < 0.65):
            self.slots["o"] = f"{rng.choice([a for a in plot.adjectives if a not in self.noun])} {self.noun}"
        self.slots["ao"] = "a " + self.slots["o"]
        self.slots["o2"] = f"{rng.choice(ADJECTIVES)} {rng.choice([t for t in THINGS if t != self.noun])}"
        self.slots["ao2"] = "a " + self.slots["o2"]
        self.slots |= {"c": rng.choice(COLORS), "n": rng.choice(NUMBERS), "s": rng.choice(SEASONS)}
        self.slots["weekday"] = rng.choice(WEEKDAYS)
        self.trait = rng.choice(TRAITS)
        if plot.needs == "it":
            self.slots["X"] = "the " + self.noun
            self._pronouns(IT, "")

    def _pronouns(self, words: dict[str, str], tail: str) -> None:
        for slot, word in words.items():
            self.slots[slot + tail] = word
            self.slots[slot.capitalize() + tail] = word.capitalize()

    def fill(self, beat: str) -> str:
        """One alternative with its choices made and its slots filled. A weather or a time is drawn anew each time."""
        text = re.sub(r"\[([^\]]+)\]", lambda m: self.rng.choice(m.group(1).split("/")), beat)
        drawn = {"w": self.rng.choice(WEATHERS), "d": self.rng.choice(TIMES)}
        text = re.sub(r"\{([^}]+)\}", lambda m: drawn.get(m.group(1)) or self.slots[m.group(1)], text)
        return polish(text)

    def pick(self, *alternatives: str) -> str:
        return self.fill(self.rng.choice(alternatives))


def _about(cast: Cast, home: bool = True) -> list[str]:
    """Up to two sentences about a hero whose name is known; with `home` one may say where the hero lives."""
    rng = cast.rng
    more = [f"{{He}} {rng.choice(LIKES)}."]
    if home:
        more.append(f"{{He}} lived {rng.choice(HOMES)}.")
    rng.shuffle(more)
    return [cast.fill(m) for m in more[: rng.choice((0, 1, 1, 2))]]


def _introduction(cast: Cast) -> list[str]:
    """The first sentences: the hero, not yet the object."""
    who, home = f"a {cast.trait} {{k}}", cast.rng.choice(HOMES)
    form = cast.rng.random()
    if form < 0.5:
        return [cast.fill(f"Once upon a time, there was {who} named {{X}}."), *_about(cast)]
    if form < 0.6:
        return [cast.fill(f"Once upon a time, {home}, there lived {who} called {{X}}."), *_about(cast, home=False)]
    if form < 0.7:
        return [cast.fill(f"Once upon a time, {who} lived {home}. {{His}} name was {{X}}.")]
    if form < 0.8:
        return [cast.fill(f"{{X}} was {who} who lived {home}."), *_about(cast, home=False)]
    if form < 0.87:
        return [cast.fill(f"There was once {who} who lived {home}. Everybody called {{him}} {{X}}.")]
    if form < 0.93:
        return [cast.fill(f"A long time ago, {who} lived {home}. {{His}} name was {{X}}.")]
    return [cast.fill(f"{{X}} was {who}."), *_about(cast)[:1]]


def _sitting(cast: Cast) -> list[str]:
    """A hero that is seen before it is named: "A bird sat in a tree." """
    seat = cast.rng.choice(SEATS)
    who = cast.rng.choice(("a {k}", f"a {cast.trait} {{k}}"))
    first = cast.fill(f"{who} {cast.rng.choice(('sat', 'sat', 'sat', 'was sitting'))} {seat}.")
    return [first, cast.pick("{His} name was {X}.", "Everybody called {him} {X}."), *_about(cast)[:1]]


def _opening(cast: Cast) -> list[str]:
    rng, needs = cast.rng, cast.plot.needs
    if needs == "it":
        noun, what = cast.noun, cast.slots["o"]
        return [
            cast.pick(
                f"Once upon a time, there was a {what}.",
                f"Once upon a time, there was a {what}.",
                f"The {what} was not happy.",
                f"The {what} was very old.",
                f"The {what} belonged to nobody.",
                f"The {what} was all alone.",
                f"There was once a {what}.",
                f"This is the story of a {what}.",
                f"Nobody knew how old the {noun} was.",
            )
        ]
    if needs == "go":
        asked = cast.pick(
            '"Where are you going?" asked {Y}.',
            '"Where are you going?" asked {Y} the {k2}.',
            '"Where are you going so early?" {Y} asked {X}.',
            '"Where are you going, {X}?" asked {Y} the {k2}.',
        )
        if rng.random() < 0.6:
            return [asked]
        met = cast.pick("One {w} day, {he} met {Y}.", "One {d}, {Y} met {him} on the road.")
        return [*_introduction(cast), met, asked]
    if needs == "found":
        form = rng.random()
        who = "{X}" if form < 0.7 else "{he}"
        when = rng.choice(("One {w} day", "One {w} day", "One {w} {d}", "One {d}", "One day"))
        hook = cast.fill(f"{when}, {who} found {{ao}}" + rng.choice((".", ".", " {p}.")))
        if form < 0.4:
            return [hook]
        return [*(_introduction(cast) if form < 0.9 else _sitting(cast)), hook]
    if needs == "had":
        form = rng.random()
        if form < 0.35:
            return [cast.pick("{X} had {ao}.", "{X} had {ao}.", "{X} the {k} had {ao}.")]
        if form < 0.5:
            return [cast.fill(rng.choice(("The {k}", f"The {cast.trait} {{k}}", "A {k}")) + " named {X} had {ao}.")]
        if form < 0.6:
            return [cast.pick("The {k} had {ao}. {His} name was {X}.")]
        hook = cast.pick("{He} had {ao}.", "{X} had {ao}.", "{X} had {ao}.")
        return [*(_introduction(cast) if form < 0.9 else _sitting(cast)), hook]
    form = rng.random()
    if form < 0.2 and cast.plot.beats[0][0].startswith("One"):
        return []
    if form < 0.3:
        return [cast.pick("{X} the {k} lived ") + rng.choice(HOMES) + ".", *_about(cast, home=False)]
    return _introduction(cast) if form < 0.85 else _sitting(cast)


def story(rng: random.Random) -> str:
    """One story of 11 to 18 beats, about 20 short sentences, sometimes in paragraphs."""
    plot = rng.choice(PLOTS)
    cast = Cast(rng, plot)
    sentences = _opening(cast)
    for beat in plot.beats:
        if beat[0].startswith("?") and rng.random() < 0.5:
            continue
        sentences.append(cast.fill(rng.choice(beat).lstrip("? ")))
    if rng.random() < 0.1:
        sentences.append(rng.choice(("The end.", "And that is the end of the story.", "That is all.")))
    breaks = set(rng.sample(range(3, len(sentences) - 1), 2)) if rng.random() < 0.35 else set()
    return "".join(("" if i == 0 else "\n" if i in breaks else " ") + s for i, s in enumerate(sentences))


def fact(rng: random.Random) -> str:
    """A question with its right answer."""
    table = rng.choice(FACTS)
    if rng.random() < 0.5:  # long tables more often
        table = rng.choices(FACTS, [len(t.rows) for t in FACTS])[0]
    row = rng.choice(table.rows)
    question, answer = (polish(rng.choice(t).format(*row)) for t in (table.questions, table.answers))
    return f"Question: {question}\nAnswer: {answer}"


def documents(seed: int) -> Iterator[str]:
    """Yields documents without end; the same seed gives the same ones."""
    rng = random.Random(seed)
    while True:
        yield fact(rng) if rng.random() < FACT_SHARE else story(rng)


@dataclass(frozen=True)
class Variety:
    """How varied stories are."""

    # Distinct first 60 characters, and distinct runs of 8 words, as shares of all.
    openings: float
    eight_grams: float
    # Share of stories whose runs of 5 words are for the most part those of one other story of a sample.
    near_duplicates: float


def variety(stories: list[str], sample: int = 2000) -> Variety:
    """Measures `stories`; near duplicates among the first `sample` (two stories that share over 70% of 5-grams)."""
    openings = len({s[:60] for s in stories}) / len(stories)
    seen: set[int] = set()
    total = 0
    for s in stories:
        words = s.split()
        grams = [hash(tuple(words[i : i + 8])) for i in range(len(words) - 7)]
        total += len(grams)
        seen.update(grams)
    where: dict[int, list[int]] = {}
    near = 0
    for i, s in enumerate(stories[:sample]):
        words = s.split()
        five = {hash(tuple(words[j : j + 5])) for j in range(len(words) - 4)}
        shared = Counter(other for g in five for other in where.get(g, ()))
        near += bool(shared) and shared.most_common(1)[0][1] > 0.7 * len(five)
        for g in five:
            where.setdefault(g, []).append(i)
    return Variety(openings, len(seen) / total, near / min(sample, len(stories)))
