"""Word lists and made-up words of the base model's curriculum; none belong to the target tools."""

from __future__ import annotations

import random


def split_words(text: str) -> tuple[str, ...]:
    """Split a list at its spaces."""
    return tuple(text.split())


def split_phrases(text: str) -> tuple[str, ...]:
    """Split a list at its commas."""
    return tuple(text.split(","))


VERBS = split_words(
    "arrange assemble assign archive bake borrow brew build carry check clean collect compare cook count craft "
    "deliver design draw dye examine export feed fetch file fill film fix fold forward gather grade grow "
    "harvest hire hold import inspect invite join label launch lend list load lock log make mark measure merge "
    "mix monitor move mow name note open order organize pack paint park pay pick plan plant polish post "
    "prepare press print protect pull query raise rate read record register rent repair report request reserve "
    "review sample save scan seal select sell send share ship show sign sort start stop store study submit "
    "supply swap tag teach test trace track trade train trim tune update upload use verify view visit wash "
    "watch water wrap write add book buy cancel change create delete find get look play put set search "
    "schedule turn remind"
)

NOUNS = split_words(
    "apron arrow badge bag barn barrel basket bed bell bench bike blanket board boat boiler bottle bowl box "
    "bracelet brick bridge brush bucket bus button cabin cable cake camera candle canoe card carpet cart case "
    "castle catalog chair chart chest choir circuit class clinic clock cloth club coach coat coin contract "
    "cottage course crate crop cup curtain desk diagram diary dish dock door dress drum engine essay exam "
    "fabric farm fence ferry fleet floor flower folder forest form fountain frame fruit furnace garden garment "
    "gate gift glass glove goal grant grill guitar hall hammer harbor hat herd hive honey horse house hut "
    "invoice island jacket jar jewel journal kettle kit kite label ladder lake lamp land lease lens letter "
    "library license list loan locker loom machine mail map market mask meal medal menu mill mine mirror model "
    "motor museum nest net notebook novel oil orchard oven page paint paper parcel park part patent path "
    "permit photo piano pipe plane plant plate play poem pond pool poster pot printer prize pump puzzle quilt "
    "race radio raft rack ranch record ribbon ring river road robe roof rope rug saddle sail salad sample "
    "scarf school screen script sculpture seed sensor shed sheet shelf ship shirt shop sign sketch soap sock "
    "song soup space spoon stable stage stamp statue stove street suit survey sword table tank tape team tent "
    "theater ticket tile tool tower toy track tractor trail tree truck tunnel uniform valley van vase vehicle "
    "vessel video village vine violin wagon wall watch wheel window wine wire wood workshop yard"
)

ADJECTIVES = split_words(
    "big small red blue green old new bright dark quick slow warm cold light heavy soft hard quiet loud sweet "
    "fresh wooden silver golden plain round square tall short wide narrow clean rough smooth early late local "
    "daily weekly monthly yearly spare simple fancy cheap public"
)

SYNONYMS = {
    "reserve": ("reserve", "book", "save", "hold"),
    "find": ("find", "look for", "search for", "look up"),
    "send": ("send", "ship", "mail", "forward"),
    "create": ("create", "make", "set up", "start"),
    "cancel": ("cancel", "drop", "call off"),
    "show": ("show", "show me", "give me", "tell me"),
    "get": ("get", "give me", "show me", "tell me"),
    "buy": ("buy", "order", "get", "purchase"),
    "order": ("order", "buy", "get"),
    "add": ("add", "put", "include"),
    "change": ("change", "switch", "set", "turn"),
    "check": ("check", "look at", "tell me"),
    "record": ("record", "log", "note", "write down"),
    "schedule": ("schedule", "plan", "put down", "set up"),
}

_ONSETS = split_words("b br c ch d dr f fl g gr h j k kl l m n p pr qu r s sh sl st t th tr v w x y z")
_VOWELS = split_words("a a a e e e i i o o u ai ea ee ia io oo ou")
_CODAS = ("",) * 4 + split_words("l m n r s t x n r nd rt st ck ng ll sk m d")
# Syllables can make up a word that nobody wants to read; the same one with another vowel takes its place.
_RUDE = {"fuck": "foock", "shit": "sheet", "slut": "sloot", "dick": "deeck", "cock": "coock"}


def make_word(rng: random.Random, min_syllables: int = 1, max_syllables: int = 3) -> str:
    """Make up a lower-case word, which a model can copy only by reading it."""
    num_syllables = rng.randint(min_syllables, max_syllables)
    word = "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(num_syllables))
    for rude, other in _RUDE.items():
        word = word.replace(rude, other)
    return word


def make_name(rng: random.Random) -> str:
    """Make up a name of one or two capitalised words, as of a place or person."""
    num_words = 2 if rng.random() < 0.35 else 1
    return " ".join(make_word(rng, 1, 3).capitalize() for _ in range(num_words))


def pick_word(rng: random.Random) -> str:
    """Pick a common word or, one time in three, make one up."""
    draw = rng.random()
    if draw < 0.33:
        return make_word(rng)
    return rng.choice(NOUNS if draw < 0.8 else ADJECTIVES)
