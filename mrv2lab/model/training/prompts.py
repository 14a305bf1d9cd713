"""The project's own prompt grammar: what SmolLM2 is asked to write.

A prompt has three parts. `instruction` goes to the teacher as the user's message, `opening` starts
the teacher's reply (so it never begins with "Sure, here is ..."), and `header` precedes the reply in
the document that the small models learn from. Only `header + opening + reply` becomes training text.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

# SmolLM2's own default system prompt: with one of ours ("... simple English for young children") it looped more.
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


@dataclass(frozen=True)
class Prompt:
    """One request to the teacher, see the module's docstring for the three parts."""

    instruction: str
    opening: str
    header: str = ""


NAMES = (
    "Ada Ali Amir Amy Ana Anders Anya Ben Bo Carla Chen Clara Dan Dara Elsa Emil Emma Eva Finn Freya "
    "Gita Grace Hana Hugo Ida Igor Ines Ivan Jack Jamal Jia Jonas Juan Kai Kofi Lara Lena Leo Lily Lin "
    "Luca Mara Max Maya Mei Mia Milo Mina Nadia Nico Nina Noah Nora Olga Omar Oscar Otto Pablo Pia Priya "
    "Ravi Rosa Ruby Sam Sara Sofia Sven Tara Tess Theo Tom Uma Vera Victor Wei Yara Yuki Zara Zoe"
).split()
PEOPLE = (
    "girl|boy|farmer|baker|teacher|grandmother|grandfather|gardener|sailor|painter|fisherman|shepherd|"
    "doctor|builder|singer|postman|librarian|pilot|king|queen|princess|prince|cook|clockmaker|nurse|"
    "tailor|carpenter|beekeeper|inventor|drummer"
).split("|")
ANIMALS = (
    "fox|rabbit|bear|mouse|owl|cat|dog|duck|frog|horse|goat|turtle|squirrel|hedgehog|crow|robin|bee|"
    "snail|lion|elephant|monkey|penguin|whale|crab|fish|sheep|cow|pig|hen|donkey|deer|wolf|otter|bat|"
    "ant|butterfly|parrot|camel|kitten|puppy|dragon|robot|giraffe|swan|beaver"
).split("|")
TRAITS = (
    "little|brave|shy|clever|kind|lazy|curious|funny|quiet|proud|young|old|happy|lonely|careful|hungry|"
    "sleepy|friendly|gentle|stubborn|cheerful|honest|forgetful|patient|grumpy|tiny|playful|polite"
).split("|")
PLACES = (
    "in a small village|by the sea|near a big forest|on a farm|in a tall tower|at the edge of a lake|"
    "in a busy town|on a high hill|in a green valley|next to a river|on a quiet island|in a snowy land|"
    "in a dry desert|at school|in a garden full of flowers|in an old castle|in a library|in a kitchen|"
    "at the market|at a train station|on a boat|in a cave|under a bridge|in a toy shop|at the zoo|"
    "in a park|in a barn|on a mountain|in a deep wood|in a house with a red door|at a bus stop|"
    "in a tree house|at the beach|in a bakery|in a mill|on the moon|in a museum|behind the old wall"
).split("|")
OBJECTS = (
    "a red ball|a kite|a wooden boat|a lost key|a blue hat|a map|a drum|a lantern|a basket of apples|"
    "a warm scarf|a magic stone|a cake|a bell|a broken clock|a letter|a bicycle|a mirror|a seed|"
    "a pair of boots|a book|a box|a lamp|a pie|a ladder|a toy train|a feather|a coin|a jar of honey|"
    "a rope|a doll|a flute|a paint brush|a bucket|an umbrella|a blanket|a sandwich|an egg|a shell|"
    "a balloon|a button|a snowman|a little tree|a wheel|a pumpkin|a tent|a puzzle|a candle|a ring|"
    "a bag of nuts|a telescope|a star|a pencil|a cup of tea|a sled|a nest|a whistle|a carrot|a tower of blocks"
).split("|")
EVENTS = (
    "it gets lost|a storm comes|a new friend arrives|someone makes a mistake|they find a secret path|"
    "the lights go out|there is a race|they plan a birthday party|something breaks|they must share|"
    "a stranger asks for help|the river is too wide|it starts to snow|they hear a strange sound|"
    "someone tells a lie|a baby animal is alone|they build something together|nobody believes them|"
    "the food runs out|they learn a new song|they miss the bus|the wind takes it away|they have to wait|"
    "there is a noise at night|they swap places for a day|a tooth falls out|they grow a garden|"
    "someone is afraid of the dark|they go on a long walk|a surprise is spoiled|they say goodbye"
).split("|")
LESSONS = (
    "sharing is good|it is right to tell the truth|friends help each other|being patient pays off|"
    "it is fine to make mistakes|everyone is good at something|small things matter|kindness comes back|"
    "you should not give up|listening is important|it is good to ask for help|being different is fine|"
    "saying sorry helps|work comes before play|courage can be quiet|home is a good place|"
    "practice makes you better|you should keep a promise|being greedy is bad|trying new things is fun"
).split("|")
TIMES = (
    "morning|day|evening|night|summer day|winter morning|rainy day|windy afternoon|spring morning|"
    "Monday|Sunday|cold night|hot afternoon|foggy morning|autumn day"
).split("|")
MOODS = "funny|happy|gentle|exciting|quiet|sad but hopeful|silly|warm|mysterious|cosy".split("|")
LENGTHS = (
    "Write about six sentences.|Write about eight sentences.|Keep it under 120 words.|Write two short paragraphs.|"
    "Keep it short.|Write about ten short sentences.|Use at most 100 words.|Write one short paragraph.|"
    "Keep it under 150 words."
).split("|")
STYLES = (
    "Use easy words.|Use short sentences.|||||Let them talk to each other.|"
    "Give it a happy ending.|Give it a surprising ending.|Start right away.|Use simple past tense.|"
    "Say how they feel.|Describe what they see.|"
).split("|")
HELLOS = (
    "Hello|Good morning|Look at this|Wait for me|I have an idea|Can you help me|What is that|"
    "Come here|Do you hear it|I am hungry|Where are you going|Guess what"
).split("|")
THINGS = (
    "rain|snow|the moon|the sun|a cloud|a rainbow|the wind|a river|the sea|a mountain|a tree|a flower|a seed|"
    "a bee|a bird|a fish|a cat|a dog|a cow|a horse|an elephant|a frog|a spider|a whale|bread|milk|honey|"
    "an apple|soup|cheese|water|a bridge|a boat|a train|a plane|a bicycle|a clock|a map|a book|a pencil|"
    "a lamp|a window|a key|a hammer|a drum|a piano|a school|a library|a hospital|a farm|a shop|a museum|"
    "winter|summer|night|sleep|a dream|a friend|a family|music|a song|a story|a game|paint|glass|wood|"
    "ice|fire|salt|sand|a shadow|a mirror|a magnet|a wheel|a volcano|a desert|a forest|an island|the sky|a star"
).split("|")
QUESTIONS = (
    "What is {t}?|Why do people like {t}?|Where can you find {t}?|What can you tell me about {t}?|"
    "Why is {t} important?|What should everyone know about {t}?|How would you describe {t}?|"
    "What do you think of when you hear about {t}?|Can you say something nice about {t}?|"
    "What is interesting about {t}?|When do we see {t}?|What would happen without {t}?"
).split("|")
TASKS = (
    "make a sandwich|plant a seed|wash your hands|draw a cat|make a friend|cross a road safely|"
    "brush your teeth|build a sand castle|feed a dog|learn a song|make soup|ride a bicycle|"
    "say sorry|pack a bag|find a lost toy|fly a kite|clean a room|make a paper boat|bake bread|"
    "fall asleep|help at home|count to ten|read a map|keep warm in winter|take care of a plant|"
    "share a cake|write a letter|make a snowman|choose a book|calm down when you are angry"
).split("|")


def prompts(seed: int) -> Iterator[Prompt]:
    """Yields prompts without end; the same seed gives the same ones. About 78% stories, 12% talks, 10% questions."""
    rng = random.Random(seed)
    while True:
        kind = rng.random()
        if kind < 0.78:
            yield _story(rng)
        elif kind < 0.90:
            yield _talk(rng)
        else:
            yield _question(rng)


def _article(words: str) -> str:
    return ("an " if words[0] in "aeiou" or words.startswith("honest") else "a ") + words


def _character(rng: random.Random) -> str:
    """A noun phrase without an article, "shy fox" say."""
    return f"{rng.choice(TRAITS)} {rng.choice(ANIMALS if rng.random() < 0.5 else PEOPLE)}"


def _story(rng: random.Random) -> Prompt:
    name, friend = rng.sample(NAMES, 2)
    who, place, thing = _character(rng), rng.choice(PLACES), rng.choice(OBJECTS)
    other = rng.choice(
        (f"a friend called {friend}", f"{friend}, {_article(_character(rng))}", _article(_character(rng)))
    )
    asks = [f"Write {_article(rng.choice(MOODS))} short story about {name}, {_article(who)}, and {thing}."]
    extras = [
        f"The story happens {place}.",
        f"In the story {rng.choice(EVENTS)}.",
        f"The story shows that {rng.choice(LESSONS)}.",
        f"There is also {other}.",
    ]
    asks += rng.sample(extras, rng.randint(0, 2))
    asks += [rng.choice(STYLES), rng.choice(LENGTHS)]
    opening = rng.choice(
        (
            f"Once upon a time, there was {_article(who)} named {name}.",
            f"Once upon a time, {place}, there lived {_article(who)} called {name}.",
            f"{name} was {_article(who)} who lived {place}.",
            f"{name} was {_article(who)}.",
            f"One {rng.choice(TIMES)}, {name} found {thing}.",
            f"One {rng.choice(TIMES)}, {name} and {friend} were {place}.",
            f"One {rng.choice(TIMES)}, {name} the {who.split()[1]}",
            f"It was a {rng.choice(TIMES)}.",
            f"{name} had {thing}.",
            f"{name} and {friend} were friends.",
            f'"{rng.choice(HELLOS)}!" said {name}.',
            f"There was once {_article(who)} who",
            f"{name} wanted",
            f"{name} loved",
            f"Every {rng.choice(TIMES)}, {name}",
            f"A long time ago, {_article(who)} lived {place}.",
        )
    )
    return Prompt(" ".join(a for a in asks if a), opening)


def _talk(rng: random.Random) -> Prompt:
    name, friend = rng.sample(NAMES, 2)
    topic = rng.choice(OBJECTS + THINGS)
    ask = (
        f"Write a short talk between {name}, {_article(_character(rng))}, and {friend}, {_article(_character(rng))}, "
        f"about {topic}. Use quotation marks. {rng.choice(STYLES)} {rng.choice(LENGTHS)}"
    )
    opening = rng.choice(
        (
            f'"{rng.choice(HELLOS)}," said {name}.',
            f'"{rng.choice(HELLOS)}?" asked {name}.',
            f'{name} looked at {friend} and said, "',
            f'{name} and {friend} sat {rng.choice(PLACES)}. "',
        )
    )
    return Prompt(" ".join(ask.split()), opening)


def _question(rng: random.Random) -> Prompt:
    if rng.random() < 0.6:
        question = rng.choice(QUESTIONS).format(t=rng.choice(THINGS))
    else:
        question = f"How do you {rng.choice(TASKS)}?"
    size = rng.choice(("two", "three", "three", "four"))
    ask = f"{question} Answer in {size} short, simple sentences, in one paragraph, without a list."
    return Prompt(ask, "", header=f"Question: {question}\nAnswer:")
