"""Training conversations full of numbers: invented tools that calculate something, and requests with random values.

Seal-Tools has few arguments that are numbers and none that is a list, and a tokenizer that splits numbers into digits
needs many examples before it copies them completely. A tool here calculates an invented measure from one to three
quantities, lists of numbers or both; its values are drawn afresh for each request, with units, percent signs, minus
signs and thousands as people write them. What BFCL's tools are called is not used: rows with such names are left out.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fctune.data.augment.spoken import join_words
from fctune.data.augment.wordings import word_refusal
from fctune.data.conversation import Call, Conversation, Message, Tool


@dataclass(frozen=True, slots=True)
class Quantity:
    """A numeric parameter of an invented tool, and how its values are drawn and said.

    Attributes:
        names: Names that it may have.
        kind: Its JSON Schema type, ``integer`` or ``number``.
        description: What it is, without its article.
        draw: Draws a value and how a request says it.
    """

    names: tuple[str, ...]
    kind: str
    description: str
    draw: Callable[[random.Random], tuple[int | float, str]]


def _whole(low: int, high: int, *units: str) -> Callable[[random.Random], tuple[int | float, str]]:
    def draw(rng: random.Random) -> tuple[int | float, str]:
        # Small values are as frequent as large ones: the number of digits is drawn first.
        top = min(high, 10 ** rng.randint(1, len(str(high))))
        value = rng.randint(low, max(low + 1, top))
        said = f"{value:,}" if abs(value) > 9999 and rng.random() < 0.3 else str(value)
        return value, _with_unit(said, units, rng)

    return draw


def _decimal(low: float, high: float, *units: str) -> Callable[[random.Random], tuple[int | float, str]]:
    def draw(rng: random.Random) -> tuple[int | float, str]:
        value = round(rng.uniform(low, high), rng.choice((1, 1, 2, 3)))
        value = float(int(value)) if rng.random() < 0.3 else value
        said = str(int(value)) if value.is_integer() else str(value)
        return (int(value) if value.is_integer() else value), _with_unit(said, units, rng)

    return draw


def _share(rng: random.Random) -> tuple[int | float, str]:
    percent = rng.choice((1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 18, 20, 25, 30, 40, 60, 75, 2.5, 3.5, 4.5, 7.5))
    value = round(percent / 100, 4)
    return value, rng.choice((f"{percent}%", f"{percent}%", f"{percent} percent", str(value)))


def _large(rng: random.Random) -> tuple[int | float, str]:
    millions = rng.choice((rng.randint(1, 900), round(rng.uniform(1, 90), 1)))
    value = round(millions * 1_000_000)
    return value, rng.choice((f"{millions} million", f"{millions} million", f"{value:,}", str(value)))


def _with_unit(said: str, units: Sequence[str], rng: random.Random) -> str:
    if not units or rng.random() < 0.2:
        return said
    unit = rng.choice(units)
    if unit in ("$", "€"):
        return f"{unit}{said}"
    return f"{said}{unit}" if len(unit) < 3 and rng.random() < 0.5 else f"{said} {unit}"


QUANTITIES = (
    Quantity(("length", "side", "side_length"), "integer", "length", _whole(1, 900, "cm", "m", "meters", "feet")),
    Quantity(("width", "breadth"), "number", "width", _decimal(1, 200, "cm", "m", "meters", "inches")),
    Quantity(("depth", "thickness"), "integer", "depth", _whole(1, 300, "cm", "mm", "m")),
    Quantity(("diameter", "outer_diameter"), "number", "diameter", _decimal(1, 90, "cm", "mm", "inches")),
    Quantity(("mass", "load", "weight_kg"), "integer", "mass", _whole(1, 5000, "kg", "kilograms", "grams")),
    Quantity(("speed", "initial_speed"), "integer", "speed", _whole(1, 400, "km/h", "m/s", "mph")),
    Quantity(("angle", "tilt"), "integer", "angle", _whole(1, 180, "degrees", "°")),
    Quantity(("temperature", "outside_temperature"), "integer", "temperature", _whole(-30, 400, "°C", "degrees")),
    Quantity(("pressure",), "number", "pressure", _decimal(0.5, 40, "bar", "atm", "kPa")),
    Quantity(("voltage", "supply_voltage"), "integer", "voltage", _whole(1, 480, "V", "volts")),
    Quantity(("resistance",), "number", "resistance", _decimal(0.5, 900, "ohms", "ohm")),
    Quantity(("current_draw", "amperage"), "number", "electric current", _decimal(0.1, 60, "A", "amperes")),
    Quantity(("duration", "time_taken"), "integer", "duration", _whole(1, 600, "seconds", "minutes", "hours", "s")),
    Quantity(("num_years", "term_years", "years"), "integer", "number of years", _whole(1, 40, "years", "year")),
    Quantity(("num_months", "months"), "integer", "number of months", _whole(1, 72, "months")),
    Quantity(("start_amount", "deposit", "amount"), "integer", "amount of money", _whole(50, 900_000, "$", "$", "€")),
    Quantity(("price", "unit_price"), "number", "price", _decimal(1, 900, "$", "$", "dollars", "€")),
    Quantity(("monthly_payment", "contribution"), "integer", "monthly payment", _whole(20, 6000, "$", "dollars")),
    Quantity(("rate", "yearly_rate", "growth_rate"), "number", "rate, as a decimal, such as 0.04 for 4%,", _share),
    Quantity(("tax_rate", "discount"), "number", "rate, as a fraction", _share),
    Quantity(("num_people", "guests", "team_size"), "integer", "number of people", _whole(1, 400, "people", "guests")),
    Quantity(("inhabitants", "num_users"), "integer", "number of inhabitants or users", _large),
    Quantity(("num_draws", "attempts", "num_rolls"), "integer", "number of attempts", _whole(1, 500, "attempts")),
    Quantity(("num_hits", "good_outcomes"), "integer", "number of successes", _whole(1, 60)),
    Quantity(("lower", "x_min", "from_x"), "integer", "lower bound", _whole(-50, 90)),
    Quantity(("upper", "x_max", "to_x"), "integer", "upper bound", _whole(-9, 2000)),
    Quantity(("p", "a", "m", "k"), "integer", "first coefficient", _whole(-20, 200)),
    Quantity(("q", "b", "n", "r"), "integer", "second coefficient", _whole(-20, 200)),
    Quantity(("first_number", "x", "value1"), "integer", "first number", _whole(-9, 9000)),
    Quantity(("second_number", "y", "value2"), "integer", "second number", _whole(-9, 9000)),
    Quantity(("charge_a", "charge"), "number", "electric charge", _decimal(0.1, 90, "C", "coulombs")),
    Quantity(("density_value", "concentration"), "number", "concentration", _decimal(0.1, 30, "g/l", "mol/l")),
    Quantity(("distance_km", "gap", "separation"), "integer", "distance", _whole(1, 20_000, "km", "miles", "m")),
    Quantity(("latitude_deg", "elevation"), "number", "elevation", _decimal(-80, 80, "degrees", "m")),
    Quantity(("hour", "start_hour"), "integer", "hour of the day, 0 to 23", _whole(0, 23)),
    Quantity(("in_year", "model_year"), "integer", "calendar year", lambda rng: (y := rng.randint(1850, 2030), str(y))),
)
_LISTS = (
    *(
        "values",
        "scores",
        "readings",
        "samples",
        "prices",
        "heights",
        "weights",
        "returns",
        "payments",
        "ages",
        "sales",
    ),
    *("points", "temperatures", "marks", "series", "terms", "factors", "measurements", "yields", "lap_times"),
)
_PAIRED = (("group_a", "group_b"), ("before", "after"), ("series_x", "series_y"), ("start_point", "end_point"))
_MEASURES = (
    *("torque", "drag", "crop yield", "turnover", "dilution", "shear stress", "heat loss", "fuel need", "markup"),
    *("break-even point", "variance", "spread", "correlation", "trend", "slope", "ratio", "voltage drop", "brightness"),
    *("orbit time", "flow rate", "wavelength", "paint needed", "growth", "dosage", "moisture", "tile count", "range"),
    *(
        "payback time",
        "insulation value",
        "lift",
        "friction",
        "efficiency",
        "luminosity",
        "stopping distance",
        "median",
    ),
    *(
        "weighted mean",
        "annuity",
        "final balance",
        "net return",
        "likelihood",
        "odds",
        "surface",
        "volume",
        "perimeter",
    ),
    *("kinetic power", "recoil", "decay", "half-life", "buoyancy", "tension", "moment", "impulse", "work done"),
    *("overlap", "common multiple", "common factor", "remainder", "roots", "intersection", "difference", "product"),
    *(
        "rent index",
        "capacity",
        "time needed",
        "shipping cost",
        "staffing need",
        "carbon output",
        "water use",
        "energy",
    ),
)
_THINGS = (
    *(
        "ring",
        "beam",
        "tank",
        "cone",
        "field",
        "loan",
        "portfolio",
        "circuit",
        "engine",
        "rocket",
        "pool",
        "roof",
        "plan",
    ),
    *(
        "gas",
        "pendulum",
        "cable",
        "triangle",
        "prism",
        "ladder",
        "rectangle",
        "lens",
        "survey",
        "experiment",
        "dataset",
    ),
    *(
        "game",
        "dice roll",
        "card draw",
        "vehicle",
        "train",
        "household",
        "city",
        "forest",
        "reactor",
        "savings account",
    ),
)
_VERBS = (
    "Calculate",
    "Compute",
    "Find",
    "Determine",
    "Estimate",
    "Work out",
    "Please calculate",
    "Can you find",
    "Get",
)
_STEMS = ("calculate", "compute", "find", "get", "estimate", "determine", "calc", "evaluate", "solve")
_METHODS = ("exact", "approximate", "linear", "stepwise", "bisection", "sampling", "weighted", "pooled")


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    schema: dict[str, Any]
    draw: Callable[[random.Random], tuple[Any, str]]
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class Calculation:
    """An invented tool that calculates a measure of a thing from some quantities."""

    measure: str
    thing: str
    fields: tuple[_Field, ...]
    tool: Tool


def draw_calculation(rng: random.Random) -> Calculation:
    """Return an invented tool, which other requests may call, too."""
    measure, thing = rng.choice(_MEASURES), rng.choice(_THINGS)
    fields = _draw_fields(rng)
    return Calculation(measure, thing, tuple(fields), _make_tool(measure, thing, fields, rng))


def describe_quantities(rng: random.Random, num_calls: int = 1, calculation: Calculation | None = None) -> Conversation:
    """Make a request for a calculation with random numbers; several calls differ in one or in all quantities.

    Args:
        rng: Random generator.
        num_calls: Number of calls.
        calculation: What to ask for; None: a new one.
    """
    made = calculation or draw_calculation(rng)
    measure, thing, fields, tool = made.measure, made.thing, made.fields, made.tool
    order = rng.sample(fields, len(fields)) if rng.random() < 0.4 else list(fields)
    first = {field.name: field.draw(rng) for field in order}
    asked = [field.name for field in fields if not field.is_optional]
    varied = set(asked) if rng.random() < 0.5 else {rng.choice(asked)}
    drawn = [first]
    while len(drawn) < num_calls:
        another = {field.name: field.draw(rng) if field.name in varied else first[field.name] for field in order}
        if all([another[name][0] for name in asked] != [one[name][0] for name in asked] for one in drawn):
            drawn.append(another)
    options, clause = _draw_options(fields, rng)
    question = _word(measure, thing, drawn, varied, rng)
    ending = (
        "?" if question.startswith(("What", "Can")) else rng.choice((".", ".", "", "?" if "?" in question else "."))
    )
    calls = []
    for values in drawn:
        given = {field.name: values[field.name][0] for field in fields if not field.is_optional}
        calls.append(Call(tool.name, {**given, **options}))
    answer = Message("assistant", calls=tuple(calls))
    return Conversation((Message("user", f"{question}{clause}{ending}"), answer), (tool,), f"quantities:{tool.name}")


def describe_unfit_quantities(rng: random.Random) -> Conversation:
    """Make a request for a calculation, with tools that calculate something else; the answer is that none can do it."""
    request = describe_quantities(rng)
    taken = {_stem_words(request.tools[0])}
    tools: list[Tool] = []
    num_tools = rng.choice((1, 1, 1, 2, 3))
    while len(tools) < num_tools:
        other = describe_quantities(rng).tools[0]
        words = _stem_words(other)
        if not any(words & known for known in taken):
            taken.add(words)
            tools.append(other)
    asked = Conversation(request.messages[:1], tuple(tools), "no_call:quantities")
    answer = word_refusal(asked.tools, request.tools, rng)
    return replace(asked, messages=(*asked.messages, Message("assistant", answer)))


def _stem_words(tool: Tool) -> frozenset[str]:
    """Return the words that say what a tool calculates and of what, each by its first letters."""
    text = tool.function["description"].partition(" the ")[2].partition(" from ")[0].partition(" with ")[0]
    return frozenset(word[:5] for word in text.rstrip(".").split() if word not in ("a", "of", "the"))


def _draw_fields(rng: random.Random) -> list[_Field]:
    shape = rng.random()
    fields: list[_Field] = []
    if shape < 0.35:
        names = rng.choice(_PAIRED) if rng.random() < 0.4 else (rng.choice(_LISTS),)
        is_whole = rng.random() < 0.6
        low, high = rng.choice(((0, 9), (1, 60), (10, 99), (-20, 40), (100, 9000)))
        size = rng.choice((2, 2, 3)) if "point" in names[0] else rng.choice((3, 4, 5, 5, 6, 7, 8))
        for name in names:
            schema = {
                "type": "array",
                "items": {"type": "integer" if is_whole else "number"},
                "description": f"The {name.replace('_', ' ')} to use.",
            }
            fields.append(_Field(name, schema, _list_of(is_whole, low, high, size)))
        num_quantities = rng.choice((0, 0, 1, 1, 2))
    else:
        num_quantities = rng.choice((1, 2, 2, 2, 3, 3))
    for quantity in rng.sample(QUANTITIES, num_quantities):
        name = rng.choice(quantity.names)
        text = f"The {quantity.description}".rstrip(",")
        units = f" of the {rng.choice(_THINGS)}" if rng.random() < 0.3 else ""
        schema = {"type": quantity.kind, "description": f"{text}{units}."}
        if quantity.kind == "number" and rng.random() < 0.4:
            schema["format"] = "float"
        fields.append(_Field(name, schema, quantity.draw))
    if rng.random() < 0.5:
        fields += _draw_optional(rng)
    return fields


def _draw_optional(rng: random.Random) -> list[_Field]:
    method = {"type": "string", "enum": rng.sample(_METHODS, 3), "description": "The method. Default is the first."}
    digits = {"type": "integer", "description": "Number of decimal places. Default is 2."}
    unit = {"type": "string", "description": "The unit of the result."}
    constant = {"type": "number", "description": "A correction factor. Default is 1.0."}
    flag = {"type": "boolean", "description": "Whether to standardise the input first. Default is false."}
    schemas: tuple[tuple[str, dict[str, Any]], ...] = (
        *(("method", method), ("round_to", digits), ("unit", unit)),
        *(("factor", constant), ("standardised", flag)),
    )
    drawn = rng.sample(schemas, rng.choice((1, 1, 2)))
    return [_Field(name, schema, lambda _: (None, ""), True) for name, schema in drawn]


def _draw_options(fields: Sequence[_Field], rng: random.Random) -> tuple[dict[str, Any], str]:
    """Draw which optional parameters a request asks for, and the words that ask for them."""
    options: dict[str, Any] = {}
    clause = ""
    for field in [field for field in fields if field.is_optional]:
        if rng.random() < 0.5:
            continue
        if field.name == "method":
            value: Any = rng.choice(field.schema["enum"])
            clause += rng.choice((f" using the {value} method", f" with the {value} method"))
        elif field.name == "round_to":
            value = rng.randint(0, 6)
            clause += rng.choice((f" rounded to {value} decimal places", f", to {value} decimals"))
        elif field.name == "unit":
            value = rng.choice(("cm", "km", "kg", "joules", "watts", "dollars", "km/h", "litres", "m^2"))
            clause += f" in {value}"
        elif field.name == "factor":
            value = round(rng.uniform(0.1, 9), 2)
            clause += rng.choice((f" with a factor of {value}", f", factor {value}"))
        else:
            value = True
            clause += rng.choice((" after standardising the input", ". Also standardise it", ", standardised"))
        options[field.name] = value
    return options, clause


def _list_of(is_whole: bool, low: int, high: int, size: int) -> Callable[[random.Random], tuple[Any, str]]:
    def draw(rng: random.Random) -> tuple[Any, str]:
        values: list[Any] = [rng.randint(low, high) for _ in range(size)]
        if not is_whole and rng.random() < 0.6:
            values = [round(rng.uniform(low, high), 1) for _ in range(size)]
        texts = [str(value) for value in values]
        listed = ", ".join(texts)
        said = rng.choice(
            (f"[{listed}]", f"[{listed}]", f"[{','.join(texts)}]", f"({listed})", listed, join_words(texts))
        )
        return values, said

    return draw


def _make_tool(measure: str, thing: str, fields: list[_Field], rng: random.Random) -> Tool:
    parts = [rng.choice(_STEMS), *measure.replace("-", " ").split()]
    if rng.random() < 0.4:
        parts[1:1] = thing.split()
    name = "_".join(parts)
    if rng.random() < 0.25:
        name = f"{thing.replace(' ', '_')}.{name}"
    elif rng.random() < 0.2:
        name = parts[0] + "".join(part.capitalize() for part in parts[1:])
    properties = {field.name: field.schema for field in fields}
    parameters = {
        "type": "object",
        "properties": properties,
        "required": [field.name for field in fields if not field.is_optional],
    }
    description = f"{parts[0].replace('calc', 'calculate').replace('calculateulate', 'calculate').capitalize()} the "
    description += f"{measure} of a {thing}{rng.choice(('', ' from the given values', ' with the given inputs'))}."
    return Tool({"name": name, "description": description, "parameters": parameters})


def _word(
    measure: str, thing: str, drawn: Sequence[dict[str, tuple[Any, str]]], varied: set[str], rng: random.Random
) -> str:
    first = {name: said for name, (value, said) in drawn[0].items() if value is not None}
    style = rng.choice(
        (
            "{0} {1}",
            "{0} {1}",
            "{0} of {1}",
            "a {0} of {1}",
            "{0} = {1}",
            "{0}={1}",
            "{0} {1}",
            "the {0} {1}",
            "{0}: {1}",
        )
    )
    lead = rng.choice(_VERBS)
    of = rng.choice((f" of a {thing}", f" for a {thing}", f" for the {thing}", ""))
    link = rng.choice((" with ", " given ", " for ", ", given ", " where ", " from "))
    if len(drawn) == 1:
        given = _say(first, style)
        if rng.random() < 0.2:
            return f"The {thing} has {given}. {lead} its {measure}"
        if rng.random() < 0.25:
            return f"What is the {measure}{of}{link}{given}"
        return f"{lead} the {measure}{of}{link}{given}"
    sets = [_say({name: said for name, (value, said) in one.items() if value is not None}, style) for one in drawn]
    changes = [{name: one[name][1] for name in first if name in varied} for one in drawn]
    is_plain = not any(isinstance(value, list) for value, _ in drawn[0].values())
    if is_plain and len(varied & set(first)) > 1 and rng.random() < 0.4:
        columns = {
            name: join_words([one[name][1] for one in drawn]) if name in varied else said
            for name, said in first.items()
        }
        return f"{lead} the {measure}{of}{link}{_say(columns, style)}{rng.choice((', respectively', ' respectively'))}"
    if len(varied & set(first)) == 1 and rng.random() < 0.5:
        (name,) = varied & set(first)
        said = {**first, name: join_words([change[name] for change in changes])}
        return f"{lead} the {measure}{of}{link}{_say(said, style)}"
    if rng.random() < 0.4 and varied & set(first):
        rest = join_words([_say(change, style) for change in changes[1:]])
        again = rng.choice((". Then do the same for ", " and also for ", ". Also for ", ", and again with "))
        return f"{lead} the {measure}{of}{link}{sets[0]}{again}{rest}"
    between = rng.choice(("; ", ", then for ", " and for ", f". Also {lead.lower()} it for "))
    return f"{lead} the {measure}{of}{link}{between.join(sets)}"


def _say(said: dict[str, str], style: str) -> str:
    return join_words(
        [style.format(name if "=" in style else name.replace("_", " "), text) for name, text in said.items()]
    )
