"""The words of grammar.py: names, creatures, things, places, weathers.

A word that stands twice is drawn twice as often.
"""

from __future__ import annotations

GIRLS = (
    "Ada Alma Amy Ana Anna Anya Bea Bella Carla Cora Clara Dora Daisy Ella Elsa Emma Eva Fay Fern Flora Freya Gina "
    "Gita Grace Greta Hana Hazel Heidi Holly Ida Ina Ines Iris Ivy Jada Jia Jill Joy Judy Kate Kira Lara Lena Lily "
    "Lina Lola Lucy Luna Maya Mara Mary Mei Mia Mina Molly Nadia Nell Nina Nora Olga Olive Pam Pia Polly Poppy "
    "Priya Rita Rosa Rose Ruby Ruth Sara Sofia Sue Tara Tess Tina Uma Una Vera Viola Wanda Willa Yara Yuki Zara Zoe"
).split()
BOYS = (
    "Abe Alan Ali Amir Anders Art Ben Bert Bill Bo Boris Carl Chen Chip Clay Cole Dan Dara Dave Dirk Ed Eli Emil "
    "Eric Felix Finn Frank Fred Gabe George Gus Hal Hank Henry Hugo Igor Ike Ivan Jack Jamal Jim Joe Jonas Juan Kai "
    "Karl Ken Kofi Lars Lee Leo Lin Luca Luke Mark Max Mike Milo Ned Nick Nico Noah Olaf Omar Oscar Otto Pablo Paul "
    "Pete Pip Ralph Ravi Ray Rob Sam Sid Sven Ted Theo Tim Toby Tom Ugo Victor Vito Walt Wei Will Yan Yusuf Zack Zeno"
).split()
ANIMALS = (
    "fox|rabbit|bear|mouse|owl|cat|dog|duck|frog|horse|goat|turtle|squirrel|hedgehog|crow|robin|bird|badger|raccoon|"
    "snail|lion|elephant|monkey|penguin|crab|sheep|cow|pig|hen|donkey|deer|wolf|otter|bat|mole|hare|goose|lizard|"
    "parrot|camel|kitten|puppy|dragon|robot|giraffe|swan|beaver|pony|lamb|sparrow|toad|panda|tiger|zebra|hippo|koala|"
    "rooster|stork|weasel|dwarf|giant|fox|rabbit|bear|mouse|bird|bird|cat|dog|duck|owl|frog"
).split("|")
_BOTH = (
    "farmer|baker|gardener|sailor|painter|shepherd|doctor|builder|singer|librarian|pilot|cook|clockmaker|nurse|tailor|"
    "carpenter|beekeeper|inventor|drummer|teacher|miller|shoemaker|blacksmith|hunter|dancer|student|neighbor|driver"
).split("|")
_GIRLS = "girl|girl|girl|queen|princess|grandmother|old woman|dancer|milkmaid".split("|")
_BOYS = "boy|boy|boy|king|prince|grandfather|old man|postman|fisherman|knight".split("|")


def people(girl: bool) -> list[str]:
    """The kinds of person that a girl or woman, or a boy or man, can be."""
    return _BOTH + (_GIRLS if girl else _BOYS)


TRAITS = (
    "little|brave|shy|clever|kind|lazy|curious|funny|quiet|proud|happy|lonely|careful|hungry|sleepy|friendly|gentle|"
    "stubborn|cheerful|honest|patient|grumpy|playful|polite|merry|wise|small|little|little|busy|dreamy|good"
).split("|")
COLORS = "red|blue|green|yellow|white|pink|orange|purple".split("|")
ADJECTIVES = tuple(
    "red red blue green yellow white black brown small small big old new little pretty tiny plain fine".split()
)
THINGS = tuple(
    (
        "ball|kite|hat|drum|lantern|basket|scarf|bell|book|box|lamp|toy train|feather|coin|rope|doll|flute|bucket|"
        "blanket|shell|balloon|button|wheel|tent|puzzle|candle|ring|whistle|sled|mirror|pencil|cup|bag|coat|ribbon|"
        "marble|spoon|teapot|jar|pillow|toy boat|toy car|mug|wagon|chair|stool|picture|cap|belt|brush|ladder|top"
    ).split("|")
)
# (the place, where one is who is there)
PLACES = tuple(
    (place, f"{preposition} {place}")
    for preposition, places in (
        ("by", "the river|the pond|the lake|the sea|the well|the old wall|the gate|the road|the harbor|the fountain"),
        ("in", "the forest|the garden|the park|the valley|the barn|the meadow|the cave|the castle|the orchard"),
        ("in", "the woods|the village|the field|the yard|the churchyard"),
        ("at", "the market|the mill|the school|the station|the farm|the bakery|the inn|the zoo"),
        ("on", "the hill|the beach|the island|the bridge|the mountain"),
        ("near", "the old tower|the big oak|the windmill|the waterfall|the lighthouse|the library|the museum"),
        ("behind", "the house|the school|the shed|the bakery"),
        ("under", "the bridge|the chestnut tree|the apple tree"),
    )
    for place in places.split("|")
)
HOMES = (
    "in a small village|by the sea|near a big forest|on a farm|in a tall tower|at the edge of a lake|in a busy town|"
    "on a high hill|in a green valley|next to a river|on a quiet island|in a snowy land|in a house with a red door|"
    "in a little house by the sea|in a hut in the woods|in a cottage with a blue roof|at the end of a long road|"
    "in a hollow tree|behind the mill|in an old castle|under a big oak tree|in the middle of a forest|in a warm cave|"
    "near the old bridge|at the foot of a mountain|in a cozy little house|in a town by the river|"
    "on a street with tall trees"
).split("|")
LIKES = (
    "liked to look at the clouds|loved apple pie|liked to sing in the morning|was always in a good mood|"
    "had many friends|liked to ask questions|loved the rain|liked to read stories|loved to play outside|"
    "worked hard every day|liked to count the stars|was never in a hurry|liked warm bread with honey|"
    "loved to laugh|knew many old songs|liked to go for long walks|got up early every day|liked the smell of flowers|"
    "often forgot things|was a good listener|loved all things that were blue|liked to whistle|could not sit still|"
    "wanted to see the world|was always hungry|slept in a very small bed|had a warm heart|was good at finding things"
).split("|")
NUMBERS = "two three four five six seven eight nine ten".split()
SEASONS = "spring summer autumn".split()
WEATHERS = (
    "rainy|rainy|sunny|sunny|windy|windy|cold|hot|foggy|snowy|warm|gray|bright|stormy|cloudy|fine|cool|frosty|lovely|quiet|wet"
).split("|")
TIMES = (
    "morning|afternoon|evening|day|day|spring day|summer day|autumn day|winter morning|Sunday|Monday|Friday"
).split("|")
WEEKDAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
