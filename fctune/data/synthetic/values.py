"""Argument values by kind: made-up values for the base's curriculum, realistic ones for the target tools."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import Any, Literal

from fctune.data.synthetic.words import make_name, make_word, pick_word, split_phrases, split_words

Side = Literal["train", "held_out"]

CITIES = split_phrases(
    "Aarhus,Accra,Adelaide,Amsterdam,Ankara,Antwerp,Athens,Auckland,Bangkok,Barcelona,Basel,Bergen,Berlin,"
    "Bilbao,Bogota,Bologna,Boston,Bratislava,Brisbane,Bristol,Brussels,Budapest,Cairo,Calgary,Cape Town,"
    "Cardiff,Chicago,Cologne,Copenhagen,Cork,Dakar,Dallas,Delhi,Denver,Dresden,Dublin,Edinburgh,Florence,"
    "Geneva,Genoa,Ghent,Glasgow,Granada,Hamburg,Hanoi,Havana,Helsinki,Houston,Istanbul,Jakarta,Karachi,Kyoto,"
    "Lagos,Leeds,Leipzig,Lima,Lisbon,Liverpool,Ljubljana,London,Lyon,Madrid,Malaga,Manila,Marseille,Melbourne,"
    "Miami,Milan,Montreal,Mumbai,Munich,Nairobi,Naples,New York,Nice,Osaka,Oslo,Ottawa,Palermo,Paris,Perth,"
    "Phoenix,Porto,Prague,Quito,Riga,Rome,Rotterdam,San Diego,Santiago,Seattle,Seoul,Seville,Singapore,Sofia,"
    "Stockholm,Sydney,Tallinn,Tampere,Tokyo,Toronto,Toulouse,Trieste,Tunis,Turin,Utrecht,Valencia,Vancouver,"
    "Venice,Verona,Vienna,Vilnius,Warsaw,Zagreb,Zurich"
)
FIRST_NAMES = split_words(
    "Ada Alice Amir Anna Boris Carla Chen Clara Daniel David Elena Emma Erik Farid Felix Fiona Grace Hana Hugo "
    "Ines Ivan Jack Jana Karim Kate Lars Laura Leo Lucia Maria Marta Mei Milan Nadia Nina Noah Olga Omar Pablo "
    "Petra Priya Rosa Sam Sara Sofia Tariq Tom Vera Yuki Zoe"
)
LAST_NAMES = split_words(
    "Adams Becker Berg Costa Diaz Evans Fischer Garcia Haddad Ito Jensen Kim Kovacs Lopez Meyer Moreau Novak "
    "Okafor Olsen Patel Quinn Rossi Sato Silva Singh Torres Vidal Weber Wong Young"
)
_TITLE_HEADS = split_words(
    "Project Team Budget Design Sales Garden Yearly Weekly Monthly Family Staff Client Product Safety Market "
    "Summer Winter Board Project Travel Kitchen School Music Health"
)
_TITLE_TAILS = split_words(
    "review meeting update plan report workshop notes party lunch check summary call survey demo list"
)
_GOODS = split_words(
    "apples bananas beans bread butter carrots cheese coffee cream eggs flour garlic grapes honey jam lemons "
    "lettuce milk mushrooms nuts oats olives onions oranges pasta peaches pears pepper plums potatoes rice "
    "salt soap soup spinach sugar tea tomatoes vinegar yogurt"
)
_PRODUCTS = split_phrases(
    "backpack,bicycle,blender,bookshelf,camera,desk lamp,drill,electric kettle,guitar,hair dryer,headphones,"
    "keyboard,laptop,mattress,microphone,monitor,mouse,office chair,phone case,printer,rain jacket,router,"
    "running shoes,sleeping bag,sofa,speaker,sunglasses,tablet,tent,toaster,tripod,umbrella,vacuum cleaner,"
    "wall clock,wallet,water bottle,winter coat,yoga mat"
)
_ARTISTS_HEADS = split_words(
    "Silver Velvet Midnight Golden Electric Paper Crimson Neon Hollow Lunar Static Desert Copper"
)
_ARTISTS_TAILS = split_words("Foxes River Parade Echo Lions Harbor Tide Birds Engine Garden Wolves Mirror Road Sparks")
_TOPICS = split_words(
    "art astronomy banking baseball biology chess climate cycling dance economics education energy fashion "
    "film fishing football gardening geology golf health history housing law logic mathematics medicine music "
    "nutrition painting philosophy physics poetry politics robotics sailing science skiing space tennis "
    "theater trade transport"
)
_CURRENCIES = split_words(
    "AUD BRL CAD CHF CLP CNY CZK DKK EGP EUR GBP HUF ILS INR JPY KRW MXN NOK NZD PLN RON SEK SGD THB TRY TWD "
    "UAH USD ZAR"
)
_STREETS = split_words(
    "Apple Beach Birch Bridge Castle Cedar Chapel Church Elm Forest Garden Hill Lake Maple Market Mill Oak "
    "Park Pine River Rose School Station Valley"
)
_SKIES = split_words("sunny cloudy rainy windy foggy snowy")
_MAIL_HOSTS = split_words("mail.org post.net inbox.com office.org")


def is_held_out(kind: str, value: object) -> bool:
    """Return True for the fixed quarter of values, by hash, that is reserved for the held-out cases."""
    digest = hashlib.blake2b(f"{kind}:{value}".encode(), digest_size=2).digest()
    return digest[0] % 4 == 0


def _date(rng: random.Random) -> str:
    return f"{rng.randint(2024, 2029)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"


def _time(rng: random.Random) -> str:
    return f"{rng.randint(0, 23):02d}:{rng.choice((0, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 55)):02d}"


def _amount(rng: random.Random) -> float:
    cents = rng.choice((5, 10, 20, 25, 40, 50, 60, 75, 80, 90, 95))
    return rng.randint(1, 10 ** rng.randint(1, 3)) + cents / 100


def _code(rng: random.Random) -> str:
    letters = "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(rng.randint(1, 3)))
    return f"{letters}-{rng.randint(100, 99999)}"


def _person(rng: random.Random) -> str:
    return f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}" if rng.random() < 0.6 else rng.choice(FIRST_NAMES)


TARGET_VALUES: dict[str, Callable[[random.Random], Any]] = {
    "city": lambda rng: rng.choice(CITIES),
    "person": _person,
    "email": lambda rng: (
        f"{rng.choice(FIRST_NAMES).lower()}.{rng.choice(LAST_NAMES).lower()}@{rng.choice(_MAIL_HOSTS)}"
    ),
    "date": _date,
    "time": _time,
    "count": lambda rng: rng.randint(2, rng.choice((12, 30, 90))),
    "whole": lambda rng: rng.randint(2, 10 ** rng.randint(2, 4)),
    "amount": _amount,
    "degrees": lambda rng: round(rng.randint(5, 30) + rng.randint(1, 9) / 10, 1),
    "title": lambda rng: f"{rng.choice(_TITLE_HEADS)} {rng.choice(_TITLE_TAILS)}",
    "goods": lambda rng: rng.choice(_GOODS),
    "product": lambda rng: rng.choice(_PRODUCTS),
    "artist": lambda rng: f"{rng.choice(_ARTISTS_HEADS)} {rng.choice(_ARTISTS_TAILS)}",
    "topic": lambda rng: rng.choice(_TOPICS),
    "code": _code,
    "currency": lambda rng: rng.choice(_CURRENCIES),
    "street": lambda rng: f"{rng.randint(1, 200)} {rng.choice(_STREETS)} {rng.choice(('Street', 'Road', 'Lane'))}",
    "symbol": lambda rng: _capital_letters(rng, rng.randint(3, 4)),
}
RESULT_VALUES: dict[str, Callable[[random.Random], Any]] = {
    **TARGET_VALUES,
    "sky": lambda rng: rng.choice(_SKIES),
    "sent": lambda rng: rng.choice(("sent", "queued")),
}


def _made_up_email(rng: random.Random) -> str:
    user = make_word(rng, 1, 2) + (f".{make_word(rng, 1, 2)}" if rng.random() < 0.5 else "")
    return f"{user}@{make_word(rng, 1, 2)}.{rng.choice(('com', 'org', 'net', 'io'))}"


def _made_up_text(rng: random.Random) -> str:
    words = [pick_word(rng) for _ in range(rng.randint(1, 4))]
    if rng.random() < 0.7:
        words[0] = words[0].capitalize()
    return " ".join(words)


def _made_up_word(rng: random.Random) -> str:
    return pick_word(rng) if rng.random() < 0.7 else f"{pick_word(rng)} {pick_word(rng)}"


MADE_UP_VALUES: dict[str, Callable[[random.Random], Any]] = {
    "place": make_name,
    "person": make_name,
    "email": _made_up_email,
    "date": _date,
    "time": _time,
    "count": lambda rng: rng.randint(1, rng.choice((9, 60, 900, 9999))),
    "amount": _amount,
    "text": _made_up_text,
    "word": _made_up_word,
    "code": _code,
    "flag": lambda rng: rng.random() < 0.6,
    "list": lambda rng: [pick_word(rng) for _ in range(rng.randint(2, 4))],
}


def _capital_letters(rng: random.Random, num_letters: int) -> str:
    return "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(num_letters))


# Half of a training row's open values are made up: a model that has seen every city by name memorises the names, one
# that has not learns to copy them.
_TRAIN_ONLY_VALUES: dict[str, Callable[[random.Random], Any]] = {
    "city": make_name,
    "person": make_name,
    "email": _made_up_email,
    "title": _made_up_text,
    "goods": pick_word,
    "product": _made_up_word,
    "artist": lambda rng: f"{make_word(rng).capitalize()} {make_word(rng).capitalize()}",
    "topic": pick_word,
    "currency": lambda rng: _capital_letters(rng, 3),
    "street": lambda rng: (
        f"{rng.randint(1, 200)} {make_word(rng).capitalize()} {rng.choice(('Street', 'Road', 'Lane'))}"
    ),
}


def draw_target(kind: str, side: Side, rng: random.Random) -> Any:
    """Draw a value of this kind from this side of the split."""
    make = TARGET_VALUES[kind]
    if side == "train" and rng.random() < 0.5:
        make = _TRAIN_ONLY_VALUES.get(kind, make)
    while True:
        value = make(rng)
        if is_held_out(kind, value) == (side == "held_out"):
            return value
