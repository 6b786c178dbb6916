"""Predictions made from the expected calls by a seeded generator: correct, nearly correct and wrong in many ways."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

from fctune.data.conversation import Call
from tests.tasks.benchmarks.bfcl.bfcl_wheel import Case, gold_calls

_STRAY_VALUES: tuple[Any, ...] = (
    "", " ", "abc", "5", "true", "None", 0, 1, -1, 5, 5.0, 0.1, True, False, None, [], [1], ["a"], [[1, 2]], {},
    {"a": 1}, {"a": ["b"]}, [{"a": 1}], 1e300, 10**20, "Größe", "a'b", 'a"b',
)  # fmt: skip


def mutate(case: Case, rng: random.Random) -> list[Call]:
    """Calls for a case: an alternative of the answer with up to three mutations."""
    calls = copy.deepcopy(gold_calls(case, rank=rng.choice((0, 0, 1, 2))))
    for _ in range(rng.choice((0, 1, 1, 1, 1, 2, 3))):
        rng.choice(_MUTATIONS)(calls, case, rng)
    return calls


def odd_arguments(arguments: dict[str, Any], rng: random.Random) -> str:
    """Write arguments as JSON text, mostly with something that strict readers refuse and ``json.loads`` may take.

    No nesting comes near the depth at which ``json.loads`` gives up, which depends on its caller.
    """
    text = json.dumps(arguments)
    value = rng.choice(_ODD_VALUES)
    kind = rng.random()
    if kind < 0.1:
        return text
    if kind < 0.2:
        return value
    if kind < 0.5:
        key = next(iter(arguments), "a")
        text = json.dumps({**arguments, key: "@"}).replace('"@"', value, 1)
    elif kind < 0.8:
        pair = f"{json.dumps(rng.choice([*arguments, 'a', '']))}: {value}"
        opened, rest = text[:1], text[1:]
        joint = ", " if arguments else ""
        text = f"{opened}{pair}{joint}{rest}" if rng.random() < 0.5 else f"{text[:-1]}{joint}{pair}}}"
    if rng.random() < 0.2:
        position = rng.randrange(len(text) + 1)
        text = text[:position] + rng.choice(_ODD_PIECES) + text[position + rng.randint(0, 1) :]
    return text


_ODD_VALUES = (
    "NaN", "Infinity", "-Infinity", "1e999", "-1e999", "nan", "5", "true", "null", '"x"', "[]", "{}", "[1,]", "01",
    "9" * 5000, '"\\ud800"', '"\x01"', "'x'", "None", "{'a': 1}", '{"a": 1, "a": 2}', '{"a": NaN, "a": 2}', '{"": 1}',
    *("[" * depth + "]" * depth for depth in (100, 127, 128, 129, 200, 400, 5000)), '{"a":' * 150 + "1" + "}" * 150,
)  # fmt: skip
_ODD_PIECES = ("", " ", "\n", ",", "{", "}", "[", "]", '"', ":", "NaN", "\ufeff", "\u00a0", "\\", "/*x*/")


def as_source(value: Any, language: str, rng: random.Random, type_name: str = "") -> str:
    """A value as a programmer of Java or JavaScript could write it, not always rightly."""
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, (int, float)):
        suffix = {"float": "f", "long": "L", "Bigint": "n"}.get(type_name, "") if rng.random() < 0.9 else "L"
        return f"{value}{suffix if language == 'java' or type_name == 'Bigint' else ''}"
    if isinstance(value, str):
        return value if rng.random() < 0.8 else json.dumps(value)
    if isinstance(value, dict):
        if language == "java":
            puts = " ".join(f"put({json.dumps(key)}, {_item(item, language, rng)});" for key, item in value.items())
            return f"new HashMap<String, Object>() {{{{ {puts} }}}}"
        return (
            "{" + ", ".join(f"{rng.choice(_QUOTES)(key)}: {_item(v, language, rng)}" for key, v in value.items()) + "}"
        )
    items = ", ".join(_item(item, language, rng) for item in value)
    if language == "java":
        adds = " ".join(f"add({_item(item, language, rng)});" for item in value)
        lists = (f"new ArrayList<>(Arrays.asList({items}))", f"new ArrayList<String>() {{{{ {adds} }}}}")
        return rng.choice(lists) if type_name == "ArrayList" else f"new Object[]{{{items}}}"
    return rng.choice((f"[{items}]", f"new Array({items})"))


def _item(value: Any, language: str, rng: random.Random) -> str:
    return json.dumps(value) if isinstance(value, str) else as_source(value, language, rng)


_QUOTES: tuple[Callable[[str], str], ...] = (str, json.dumps, lambda text: f"'{text}'")


def mutate_source(case: Case, rng: random.Random) -> list[Call]:
    """Calls for a case of Java or JavaScript: values as source text, sometimes with letters lost."""
    language = case.category.removeprefix("simple_")
    schemas = case.functions[0]["parameters"]["properties"]
    calls = []
    for call in mutate(case, rng):
        arguments: dict[str, Any] = {}
        for key, value in call.arguments.items():
            text = as_source(value, language, rng, schemas.get(key, {}).get("type", ""))
            while rng.random() < 0.1:
                place = rng.randrange(len(text) + 1)
                text = text[:place] + rng.choice(("", " ", ",", '"', "]", "}", ")", "\n")) + text[place + 1 :]
            arguments[key] = text if rng.random() < 0.98 else value
        calls.append(Call(call.name, arguments))
    return calls


Mutation = Callable[[list[Call], Case, random.Random], None]
_MUTATIONS: list[Mutation] = []


def _mutation(function: Mutation) -> Mutation:
    _MUTATIONS.append(function)
    return function


def _pick(calls: list[Call], rng: random.Random) -> tuple[dict[str, Any], str | None]:
    """The arguments of one call and the name of one of them."""
    if not calls:
        return {}, None
    arguments = rng.choice(calls).arguments
    return arguments, rng.choice(list(arguments)) if arguments else None


def _containers(value: Any) -> list[Any]:
    """A value's lists and objects, at every depth."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    found = [value] if isinstance(value, (dict, list)) else []
    return found + [container for item in inner for container in _containers(item)]


@_mutation
def _stray_value(calls: list[Call], case: Case, rng: random.Random) -> None:
    arguments, key = _pick(calls, rng)
    if key is not None:
        arguments[key] = copy.deepcopy(rng.choice(_STRAY_VALUES))


@_mutation
def _other_alternative(calls: list[Call], case: Case, rng: random.Random) -> None:
    """The value of another parameter of the answer, or an alternative as it stands there, unfolded or not."""
    arguments, key = _pick(calls, rng)
    answers = [values for answer in case.answers for call in answer.values() for values in call.values()]
    if key is not None and answers:
        values = rng.choice(answers)
        arguments[key] = copy.deepcopy(rng.choice([values, *values]))


@_mutation
def _other_type(calls: list[Call], case: Case, rng: random.Random) -> None:
    arguments, key = _pick(calls, rng)
    if key is None:
        return
    value = arguments[key]
    casts: list[Callable[[Any], Any]] = [str, lambda item: [item], lambda item: {"value": item}, bool, json.dumps]
    if isinstance(value, (int, float)):
        casts += [float, int, lambda item: item + 1e-9, lambda item: -item, lambda item: item + 1]
    if isinstance(value, str):
        casts += [list, lambda item: {item: item}]
    arguments[key] = rng.choice(casts)(value)


@_mutation
def _other_spelling(calls: list[Call], case: Case, rng: random.Random) -> None:
    arguments, key = _pick(calls, rng)
    if key is None or not isinstance(arguments[key], str):
        return
    text = arguments[key]
    place = rng.randrange(len(text) + 1)
    spellings: list[Callable[[str], str]] = [
        str.upper,
        str.lower,
        str.title,
        str.swapcase,
        str.strip,
        lambda t: t[::-1],
    ]
    if rng.random() < 0.4:
        arguments[key] = rng.choice(spellings)(text)
    else:
        letter = rng.choice([*" ,./-_*^'\"\n;:()!", "", "é"])
        arguments[key] = text[:place] + letter + text[place + rng.randint(0, 1) :]


@_mutation
def _inside(calls: list[Call], case: Case, rng: random.Random) -> None:
    """Something changed in a list or object, at any depth."""
    arguments, _ = _pick(calls, rng)
    containers = _containers(arguments)[1:]
    if not containers:
        return
    container = rng.choice(containers)
    if isinstance(container, dict):
        key = rng.choice([*container, "extra"])
        if rng.random() < 0.4:
            container.pop(key, None)
        elif isinstance(container.get(key), str) and rng.random() < 0.5:
            container[key] = rng.choice((container[key].upper(), container[key] + "-", container[key] + "x"))
        else:
            container[key] = copy.deepcopy(rng.choice(_STRAY_VALUES))
        return
    action = rng.random()
    if action < 0.2:
        rng.shuffle(container)
    elif action < 0.4 and container:
        container.pop(rng.randrange(len(container)))
    elif action < 0.6 and container:
        container.append(copy.deepcopy(rng.choice(container)))
    elif container:
        place = rng.randrange(len(container))
        item = container[place]
        changes = (
            [float(item), str(item)]
            if isinstance(item, int)
            else [item.upper(), item + "."]
            if isinstance(item, str)
            else []
        )
        container[place] = copy.deepcopy(rng.choice([*changes, rng.choice(_STRAY_VALUES)]))
    else:
        container.append(copy.deepcopy(rng.choice(_STRAY_VALUES)))


@_mutation
def _argument_dropped(calls: list[Call], case: Case, rng: random.Random) -> None:
    arguments, key = _pick(calls, rng)
    if key is not None:
        del arguments[key]


@_mutation
def _optional_dropped(calls: list[Call], case: Case, rng: random.Random) -> None:
    """Every parameter left out that the answer lets be left out."""
    omittable = {
        key for answer in case.answers for call in answer.values() for key, values in call.items() if "" in values
    }
    for call in calls:
        for key in omittable & call.arguments.keys():
            del call.arguments[key]


@_mutation
def _argument_added(calls: list[Call], case: Case, rng: random.Random) -> None:
    arguments, _ = _pick(calls, rng)
    function = rng.choice(case.functions)
    key = rng.choice([*function["parameters"]["properties"], "unheard_of"])
    arguments.setdefault(key, copy.deepcopy(rng.choice(_STRAY_VALUES)))


@_mutation
def _argument_renamed(calls: list[Call], case: Case, rng: random.Random) -> None:
    arguments, key = _pick(calls, rng)
    if key is not None:
        arguments[rng.choice((key.upper(), key + "_", key[:-1]))] = arguments.pop(key)


@_mutation
def _arguments_swapped(calls: list[Call], case: Case, rng: random.Random) -> None:
    arguments, first = _pick(calls, rng)
    if first is not None:
        second = rng.choice(list(arguments))
        arguments[first], arguments[second] = arguments[second], arguments[first]


@_mutation
def _function_renamed(calls: list[Call], case: Case, rng: random.Random) -> None:
    if calls:
        place = rng.randrange(len(calls))
        name = calls[place].name
        names = [name.upper(), name + "_", name.replace(".", "_"), *(function["name"] for function in case.functions)]
        calls[place] = Call(rng.choice(names), calls[place].arguments)


@_mutation
def _reordered(calls: list[Call], case: Case, rng: random.Random) -> None:
    rng.shuffle(calls)


@_mutation
def _call_dropped(calls: list[Call], case: Case, rng: random.Random) -> None:
    if calls:
        del calls[rng.randrange(len(calls))]


@_mutation
def _call_doubled(calls: list[Call], case: Case, rng: random.Random) -> None:
    if calls:
        calls.insert(rng.randrange(len(calls) + 1), copy.deepcopy(rng.choice(calls)))


@_mutation
def _calls_mixed(calls: list[Call], case: Case, rng: random.Random) -> None:
    """An argument of one call given to another."""
    if len(calls) > 1:
        giver, taker = rng.sample(calls, 2)
        if giver.arguments:
            key = rng.choice(list(giver.arguments))
            taker.arguments[key] = giver.arguments[key]


def invented_case(rng: random.Random) -> tuple[Case, list[Call]]:
    """A case that the leaderboard does not have - odd answers, mixed alternatives - and calls that nearly fit."""
    type_names = ["string", "integer", "float", "boolean", "array", "tuple", "dict", "any"]
    scalars: list[Any] = ["", "a", "A b", "a-b", 0, 1, 1.0, 2.5, True, False, None]

    def value(depth: int = 0) -> Any:
        kind = rng.random()
        if depth > 1 or kind < 0.55:
            return rng.choice(scalars)
        if kind < 0.8:
            return [value(depth + 1) for _ in range(rng.randint(0, 2))]
        return {rng.choice("kl"): value(depth + 1) for _ in range(rng.randint(0, 2))}

    def alternative() -> Any:
        """Mostly of the leaderboard's shape: objects, alone or in lists, hold lists of alternatives."""
        found = value()
        if rng.random() < 0.7:
            if isinstance(found, dict):
                return {key: [item, *([value(2)] if rng.random() < 0.3 else [])] for key, item in found.items()}
            if isinstance(found, list):
                return [{k: [v] for k, v in item.items()} if isinstance(item, dict) else item for item in found]
        return found

    properties, answer, arguments = {}, {}, {}
    for name in "xyz"[: rng.randint(1, 3)]:
        schema: dict[str, Any] = {"type": rng.choice(type_names)}
        if rng.random() < 0.97:
            schema["items"] = {"type": rng.choice(type_names)}
        properties[name] = schema
        answer[name] = [alternative() for _ in range(rng.randint(1, 3))] + [""] * (rng.random() < 0.3)
        if rng.random() < 0.9:
            arguments[name] = _value_of(rng.choice(answer[name])) if rng.random() < 0.75 else value()
    function = {"name": "f", "parameters": {"type": "dict", "properties": properties, "required": ["x"]}}
    return Case("invented", "simple_python", [function], [{"f": answer}]), [Call("f", arguments)]


def _value_of(alternative: Any) -> Any:
    if isinstance(alternative, dict):
        return {key: item[0] if isinstance(item, list) and item else item for key, item in alternative.items()}
    if isinstance(alternative, list):
        return [_value_of(item) if isinstance(item, dict) else item for item in alternative]
    return alternative
