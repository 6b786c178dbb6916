"""Changes to a tool and a request for it that Seal-Tools lacks: further options, lists of values, numbers with units.

Each teaches the model to read the schema: an option is an argument only where the request asks for it, two values are
one call where the parameter is a list, and two calls where it is not.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fctune.data.conversation import Call, Conversation, Message, Tool

UNITS = (
    *("meters", "kilometers", "miles", "feet", "inches", "kg", "grams", "pounds", "liters", "hours", "minutes", "days"),
    *("years", "people", "dollars", "euros", "degrees", "square feet", "square meters", "percent", "units", "Joules"),
)
_LANGUAGES = ("English", "Spanish", "French", "German", "Japanese", "Italian", "Portuguese", "Chinese", "Arabic")
_PLACES = (
    "London",
    "Chicago",
    "Berlin",
    "Sydney",
    "Toronto",
    "Texas",
    "Brazil",
    "Canada",
    "New York",
    "Madrid",
    "Ohio",
)
_PARTS = ("history", "images", "reviews", "taxes", "references", "statistics", "costs", "metadata", "examples", "maps")

_FEATURES = (
    *("refundable", "pet_friendly", "wheelchair_accessible", "organic", "fragile", "private", "recursive", "anonymous"),
    *("waterproof", "furnished", "round_trip", "overnight", "gift_wrapped", "live", "verified_only", "normalized"),
)
_FACILITIES = ("Pool", "Gym", "Sauna", "Bar", "Free Wifi", "Parking Lot", "Breakfast", "Garden", "Pet Area", "Shuttle")
_PERIODS = ("last_week", "last_month", "three_months", "half_year", "two_years", "ten_years", "all_time")
_LEVELS = ("very low", "low", "medium", "high", "very high", "beginner", "advanced", "small", "large", "slow", "fast")
_CITIES = {
    "Denver": "Denver, CO",
    "Miami": "Miami, FL",
    "Dallas": "Dallas, TX",
    "Houston": "Houston, TX",
    "Seattle": "Seattle, WA",
    "Portland": "Portland, OR",
    "Atlanta": "Atlanta, GA",
    "Phoenix": "Phoenix, AZ",
    "Chicago": "Chicago, IL",
    "Boston": "Boston, MA",
    "Detroit": "Detroit, MI",
    "Nashville": "Nashville, TN",
    "San Francisco": "San Francisco, CA",
    "Los Angeles": "Los Angeles, CA",
    "San Jose": "San Jose, CA",
    "New York": "New York, NY",
    "Buffalo": "Buffalo, NY",
    "Oakland": "Oakland, CA",
    "Las Vegas": "Las Vegas, NV",
    "Minneapolis": "Minneapolis, MN",
    "Baltimore": "Baltimore, MD",
    "Cleveland": "Cleveland, OH",
}


@dataclass(frozen=True, slots=True)
class Option:
    """A parameter that a tool may get, and a clause that asks for it.

    Attributes:
        names: Names that it may have.
        schema: Its JSON Schema.
        draw: Draws a value and the clause.
    """

    names: tuple[str, ...]
    schema: dict[str, Any]
    draw: Callable[[random.Random], tuple[Any, str]]


def _choose(values: Sequence[Any], *clauses: str) -> Callable[[random.Random], tuple[Any, str]]:
    def draw(rng: random.Random) -> tuple[Any, str]:
        value = rng.choice(values)
        return value, rng.choice(clauses).format(value)

    return draw


def _flag(yes: Sequence[str], no: Sequence[str]) -> Callable[[random.Random], tuple[Any, str]]:
    def draw(rng: random.Random) -> tuple[Any, str]:
        value = rng.random() < 0.7
        return value, rng.choice(yes if value else no)

    return draw


def _some(values: Sequence[str], clause: str) -> Callable[[random.Random], tuple[Any, str]]:
    def draw(rng: random.Random) -> tuple[Any, str]:
        chosen = rng.sample(list(values), rng.choice((1, 2, 2, 3)))
        said = chosen[0] if len(chosen) == 1 else f"{', '.join(chosen[:-1])} and {chosen[-1]}"
        return chosen, clause.format(said)

    return draw


def _numbers(name: str) -> Callable[[random.Random], tuple[Any, str]]:
    def draw(rng: random.Random) -> tuple[Any, str]:
        values = rng.sample(range(1, 90), rng.choice((2, 3, 4)))
        said = ", ".join(map(str, values[:-1])) + f" and {values[-1]}"
        return values, rng.choice((f" with {name} {said}", f" with {name} {values}", f", {name}={values}"))

    return draw


def _city(rng: random.Random) -> tuple[str, str]:
    city, full = rng.choice(list(_CITIES.items()))
    return full, rng.choice((f" in {city}", f" in {full}", f" near {city}", f" around {full}"))


def _period(rng: random.Random) -> tuple[str, str]:
    period = rng.choice(_PERIODS)
    return period, rng.choice((" for the {}", " over the {}", ", {} only")).format(period.replace("_", " "))


def _string(description: str, **more: Any) -> dict[str, Any]:
    return {"type": "string", "description": description, **more}


OPTIONS = (
    Option(
        ("unit", "units", "measurement_unit"),
        _string("Unit of the result. Default is metric."),
        _choose(UNITS, " in {}", ", measured in {}", ", in {}"),
    ),
    Option(
        ("format", "output_format", "file_type"),
        _string("Format of the answer.", enum=["json", "csv", "xml", "pdf"]),
        _choose(("json", "csv", "xml", "pdf"), " as {}", " in {} format", ", as a {} file"),
    ),
    Option(("language", "lang"), _string("Language of the answer. Default is English."), _choose(_LANGUAGES, " in {}")),
    Option(
        ("limit", "max_results", "number", "count", "top"),
        {"type": "integer", "description": "The number of results to return. Default is 10."},
        _choose((1, 2, 3, 5, 7, 8, 15, 20, 25), ", the top {} only", ". Give me {} results", ", at most {}"),
    ),
    Option(
        ("detailed", "detail", "include_details", "verbose"),
        {"type": "boolean", "description": "Whether to return all details. Default is false."},
        _flag((" with full details", ", in detail", ", with all details"), (" without details", ", no details please")),
    ),
    Option(
        ("sort_by", "order_by", "sort"),
        _string("The field to sort by."),
        _choose(("price", "date", "rating", "popularity", "name", "distance"), ", sorted by {}", " ordered by {}"),
    ),
    Option(
        ("year",),
        {"type": "integer", "description": "The year of interest."},
        _choose(range(1980, 2026), " in {}", " for the year {}", ", in the year {}"),
    ),
    Option(
        ("max_price", "budget", "price_limit"),
        {"type": "number", "description": "The highest price in dollars."},
        _choose((20, 50, 99.5, 150, 300, 500, 1200, 2500), " under ${}", ", for at most ${}", " below {} dollars"),
    ),
    Option(
        ("precision", "decimals", "round_to"),
        {"type": "integer", "description": "The number of decimal places. Default is 2."},
        _choose((0, 1, 3, 4, 5, 6), " with {} decimal places", ", rounded to {} decimals"),
    ),
    Option(
        ("include", "fields", "sections"),
        {"type": "array", "items": {"type": "string"}, "description": "The parts to include."},
        _some(_PARTS, ", including {}"),
    ),
    Option(
        ("locations", "places", "regions"),
        {"type": "array", "items": {"type": "string"}, "description": "The places to look at."},
        _some(_PLACES, " in {}"),
    ),
    Option(
        ("start_year", "from_year", "begin_year"),
        {"type": "integer", "description": "The first year."},
        _choose(range(1900, 2020), " since {}", " from {} on", ", starting in {}"),
    ),
    *(
        Option(
            (f"include_{part}", f"with_{part}"),
            {"type": "boolean", "description": f"Whether to include {part}. Default is false."},
            _flag((f" including {part}", f", with {part}"), (f" without {part}", f", no {part}")),
        )
        for part in _PARTS
    ),
    *(
        Option(
            (feature, f"is_{feature}"),
            {"type": "boolean", "description": f"Whether it is {feature.replace('_', ' ')}. Default is false."},
            _flag(
                (f", {feature.replace('_', ' ')}", f" that is {feature.replace('_', ' ')}"),
                (f", not {feature.replace('_', ' ')}", f". It need not be {feature.replace('_', ' ')}"),
            ),
        )
        for feature in _FEATURES
    ),
    *(
        Option(
            names,
            {"type": "array", "items": {"type": "string", "enum": list(enum)}, "description": "What it must have."},
            _some(enum, ", with {}"),
        )
        for names, enum in ((("facilities",), _FACILITIES[:5]), (("amenities", "extras"), _FACILITIES[5:]))
    ),
    Option(("location", "city", "area"), _string("The city and state, such as Austin, TX."), _city),
    Option(("period", "time_span"), _string("The period to look at.", enum=list(_PERIODS)), _period),
    *(
        Option(
            (name,),
            _string(f"The {name}.", enum=list(_LEVELS)),
            _choose(_LEVELS, f", {name} {{}}", f" with {{}} {name}"),
        )
        for name in ("level", "intensity", "size", "difficulty")
    ),
    *(
        Option(
            (name,),
            {"type": "array", "items": {"type": kind}, "description": "The numbers to use."},
            _numbers(name),
        )
        for name, kind in (("sizes", "integer"), ("steps", "integer"), ("thresholds", "number"), ("shares", "number"))
    ),
)


def add_options(conversation: Conversation, rng: random.Random) -> Conversation:
    """Return a one-call question whose tool has one to three more parameters, of which the question asks for some."""
    question, answer = conversation.messages[0].content or "", conversation.messages[-1]
    name = answer.calls[0].name
    tool = next(tool for tool in conversation.tools if tool.name == name)
    schema = dict(tool.parameters)
    properties = dict(schema.get("properties", {}))
    required = list(schema.get("required", ()))
    asked: dict[str, Any] = {}
    text = question.rstrip()
    ending = text[-1] if text[-1:] in ".?!" else ""
    text = text.rstrip(".?!")
    for option in rng.sample(OPTIONS, rng.choice((1, 1, 2, 2, 3))):
        key = rng.choice(option.names)
        if key in properties:
            continue
        properties[key] = option.schema
        if rng.random() < 0.55:
            value, clause = option.draw(rng)
            asked[key] = value
            text += clause
            if rng.random() < 0.25:
                required.append(key)
    function = {**tool.function, "parameters": {**schema, "properties": properties, "required": required}}
    calls = tuple(replace(call, arguments={**call.arguments, **asked}, id=None) for call in answer.calls)
    return replace(
        conversation,
        messages=(Message("user", text + ending), replace(answer, calls=calls)),
        tools=tuple(Tool(function) if one.name == name else one for one in conversation.tools),
    )


def make_list(conversation: Conversation, rng: random.Random) -> Conversation | None:
    """Return calls of one tool that differ in one argument as one call with a list; None if they differ in more.

    The parameter becomes an array of the values, so the same question has another answer under another schema.
    """
    answer = conversation.messages[-1]
    first = answer.calls[0]
    varied = [name for name in first.arguments if len({str(call.arguments.get(name)) for call in answer.calls}) > 1]
    if len(varied) != 1 or len({call.name for call in answer.calls}) > 1:
        return None
    tool = next(tool for tool in conversation.tools if tool.name == first.name)
    key = varied[0]
    new = f"{key}s" if rng.random() < 0.6 and not key.endswith("s") else key
    schema = tool.parameters["properties"][key]
    items = {"type": schema.get("type", "string")}
    listed = {"type": "array", "items": items, "description": schema.get("description", "")}
    properties = {
        (new if name == key else name): (listed if name == key else one)
        for name, one in tool.parameters["properties"].items()
    }
    required = [new if name == key else name for name in tool.parameters.get("required", ())]
    function = {**tool.function, "parameters": {"type": "object", "properties": properties, "required": required}}
    values = [call.arguments[key] for call in answer.calls]
    arguments = {(new if name == key else name): (values if name == key else v) for name, v in first.arguments.items()}
    return replace(
        conversation,
        messages=(*conversation.messages[:-1], replace(answer, calls=(Call(first.name, arguments),))),
        tools=tuple(Tool(function) if one.name == tool.name else one for one in conversation.tools),
        source="list",
    )
