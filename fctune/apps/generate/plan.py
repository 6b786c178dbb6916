"""The plan of each row: its kind, the tools on offer, whom the teacher speaks for, and the seed of its answers.

A plan follows from the seed, the row's number and its kind alone, so a resumed run asks for the same rows.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fctune.apps.generate.kinds import KINDS
from fctune.apps.generate.references import find_unresolvable, inline_references
from fctune.apps.generate.values import draw_arguments
from fctune.base.errors import ConfigError
from fctune.data.augment.spoken import list_properties, split_words
from fctune.data.augment.tool_pool import ToolPool
from fctune.data.conversation import Call, Conversation, Tool
from fctune.data.tool_schema import ToolSet, allows_nothing

_MIN_OFFERED = 3
_NEEDS = {
    "several_calls": "a row needs two tools for it",
    "missing_value": "no tool has a required parameter",
    "dependent_calls": "no tool requires what another returns, as far as their descriptions tell",
}
_NUM_EXAMPLES = 2
_HIDDEN_SHARE = 0.5
_PERSONAS = (
    "a busy office manager",
    "a student who writes as in a chat, without capital letters",
    "a retired engineer who is exact about numbers",
    "a parent with a child on the arm, who types as little as possible",
    "a new employee who does not know the terms of the trade",
    "a customer who is slightly annoyed",
    "someone whose first language is not English, with small mistakes",
    "a friendly regular who adds a remark that does not matter",
    "a manager who gives orders in half sentences",
    "a careful planner who explains why",
    "someone dictating to a phone, without punctuation",
    "a professional who uses the trade's abbreviations",
    "a tourist who asks politely",
    "someone who corrects himself in the middle of the sentence",
    "a night-shift worker who is short of words",
    "an assistant who passes on what the boss wants",
)
_STYLES = (
    "a question",
    "an instruction in one short sentence",
    "two sentences, the first of which gives the background",
    "a hint at what is needed rather than a command",
    "values first, the wish last",
    "a message as in an e-mail, without greeting",
    "a casual chat message",
    "a full, polite sentence",
    "a fragment without a verb",
    "a sentence that names values in other words than the schema does, but without doubt",
)


@dataclass(frozen=True, slots=True)
class RowPlan:
    """One row that the teacher is asked to write, decided by the seed before anything is sent.

    Attributes:
        index: Number of the row among all that are asked for, from 0.
        kind: One of ``KINDS``.
        tools: Tools on offer in the row.
        targets: Tools that the request is about.
        hidden: The target of a request that no tool on offer can fulfil; it is not on offer.
        missing: Required parameter of the target that the request leaves out.
        calls: Calls to write a request for, with the values that were drawn; the teacher adds those that are missing.
        persona: Who asks.
        style: How the request is worded.
        examples: Requests of the user's own rows, to imitate.
        seed: Seed of the teacher's answers.
    """

    index: int
    kind: str
    tools: tuple[Tool, ...]
    targets: tuple[Tool, ...]
    hidden: Tool | None
    missing: str | None
    calls: tuple[Call, ...]
    persona: str
    style: str
    examples: tuple[str, ...]
    seed: int


class Planner:
    """Plans rows so that all tools are used equally often.

    Args:
        tools: The user's tools.
        shares: Share of each kind; None: the default kinds, without those that the tools do not allow.
        seed: Seed of all choices.
        max_tools: Most tools on offer in a row.
        examples: Requests to imitate.
        hides_tools: Every request that no tool on offer fulfils is one to a tool that was taken off offer, so that it
            can be drafted, unless all tools are alike.
        max_small_talk: Most rows of small talk in a run; None: any number.

    Raises:
        ConfigError: A tool cannot be called at all, or the tools do not allow a kind that was named.
    """

    def __init__(
        self,
        tools: Sequence[Tool],
        shares: Mapping[str, float] | None,
        seed: int,
        max_tools: int = 8,
        examples: Sequence[str] = (),
        hides_tools: bool = False,
        max_small_talk: int | None = None,
    ):
        check_tools(tools)
        tools = [inline_references(tool) for tool in tools]
        self._max_small_talk = max_small_talk
        self._hidden_share = 1.0 if hides_tools else _HIDDEN_SHARE
        self.tools, self.seed, self.max_tools, self.examples = tuple(tools), seed, max_tools, tuple(examples)
        self._pool = ToolPool()
        self._pool.add(Conversation((), self.tools))
        self._requiring = [tool for tool in tools if _list_required(tool)]
        impossible = {"several_calls": min(len(tools), max_tools) < 2, "missing_value": not self._requiring}
        # A teacher that writes requests may see a dependence that the tools' words do not tell.
        unlikely = {"dependent_calls": hides_tools and not _has_dependence(tools)}
        if shares is not None:
            for kind in shares:
                if impossible.get(kind):
                    if kind == "several_calls" and len(tools) > 1:
                        raise ConfigError("--kinds several_calls: needs two tools in a row. Raise --max-tools.")
                    needs = "two tools or more" if kind == "several_calls" else "a tool with a required parameter"
                    raise ConfigError(f"--kinds {kind}: needs {needs}. Leave it out, or add tools.")
        left_out = [kind for kind in KINDS if impossible.get(kind) or unlikely.get(kind)]
        chosen = shares or {kind: share for kind, share in KINDS.items() if kind not in left_out}
        self._left_out = () if shares else tuple(left_out)
        total = sum(chosen.values())
        self.shares = {kind: share / total for kind, share in chosen.items()}

    def split(self, num_rows: int) -> dict[str, int]:
        """Return the number of rows of each kind, which add up to ``num_rows``.

        Raises:
            ConfigError: Small talk is limited, and there is no other kind.
        """
        counts, most = _apportion(num_rows, self.shares), self._max_small_talk
        if most is None or counts.get("small_talk", 0) <= most:
            return counts
        others = {kind: share for kind, share in self.shares.items() if kind != "small_talk"}
        if not others:
            raise ConfigError(
                f"--kinds small_talk: --requests drafted has at most {most:,} different rows of it. Lower --num, or "
                "add kinds."
            )
        counts |= {"small_talk": most, **_apportion(num_rows - most, others)}
        return counts

    def describe_left_out(self) -> list[str]:
        """Return a sentence for each default kind that the tools do not allow."""
        return [f"{kind}: left out, as {_NEEDS[kind]}; other kinds get its share." for kind in self._left_out]

    def describe_limit(self, num_rows: int) -> str | None:
        """Return a sentence if a kind gets fewer rows than its share, because it has no more."""
        wanted, given = _apportion(num_rows, self.shares).get("small_talk", 0), self.split(num_rows).get("small_talk")
        if wanted == (given or 0):
            return None
        return (
            f"small_talk: {given:,} rows in place of {wanted:,}, as there are no more drafts; other kinds get the rest."
        )

    def choose_kinds(self, wanted: Mapping[str, int], size: int, wave: int) -> list[str]:
        """Return the kinds of the next ``size`` rows, in the proportion of the rows that are still wanted."""
        counts = _apportion(size, wanted)
        kinds = [kind for kind, count in counts.items() for _ in range(count)]
        random.Random(f"{self.seed}/wave/{wave}").shuffle(kinds)
        return kinds

    def plan(self, index: int, kind: str) -> RowPlan:
        """Return the plan of a row."""
        rng = random.Random(f"{self.seed}/{index}/{kind}")
        pool = self._requiring if kind == "missing_value" else self.tools
        order = list(pool)
        random.Random(f"{self.seed}/{index // len(pool)}").shuffle(order)
        turn = index % len(pool)
        first = order[turn]
        if kind == "no_tool":  # a tool cannot be missing where all others may do the same
            first = next(filter(self._has_others, (*order[turn:], *order[:turn])), first)
        others = [tool for tool in self.tools if tool is not first]
        rng.shuffle(others)
        num_targets = {"several_calls": 2 + (len(others) > 1 and rng.random() < 0.4)}.get(kind, 1)
        if kind in ("dependent_calls", "multi_turn") and others:
            num_targets = rng.choice((1, 2))
        most = min(self.max_tools, len(self.tools))
        targets = [first, *others[: min(num_targets, most) - 1]]
        hidden = first if kind == "no_tool" and others and rng.random() < self._hidden_share else None
        num_offered = rng.randint(min(_MIN_OFFERED, most), most)
        offered = [*targets, *[tool for tool in others if tool not in targets]][: max(num_offered, len(targets))]
        if hidden is not None:
            others = [tool for tool in others if not self._pool.are_alike(hidden, tool)]
            hidden = hidden if others else None
        if hidden is not None:
            offered = others[: max(num_offered - 1, 1)]
        rng.shuffle(offered)
        missing = rng.choice(_list_required(first)) if kind == "missing_value" else None
        named = {"repeated_tool": [first] * rng.choice((2, 2, 3)), "several_calls": targets}.get(kind, [first])
        return RowPlan(
            index=index,
            kind=kind,
            tools=tuple(offered),
            targets=tuple(targets),
            hidden=hidden,
            missing=missing,
            calls=tuple(Call(tool.name, draw_arguments(tool, rng)) for tool in named),
            persona=rng.choice(_PERSONAS),
            style=rng.choice(_STYLES),
            examples=tuple(rng.sample(self.examples, min(_NUM_EXAMPLES, len(self.examples)))),
            seed=rng.randrange(2**31),
        )

    def _has_others(self, tool: Tool) -> bool:
        """Return True if there is a tool that cannot do what this one does, as far as their descriptions tell."""
        return any(not self._pool.are_alike(tool, other) for other in self.tools if other is not tool)

    def digest(self) -> str:
        """Return a digest of the tools and examples, which a resumed run must have as well."""
        text = json.dumps([[tool.to_openai() for tool in self.tools], self.examples])
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _has_dependence(tools: Sequence[Tool]) -> bool:
    """Return True if a tool requires what another, which does not take it, may return, as its words tell."""
    returned = {}
    for tool in tools:
        output = tool.function.get("outputSchema") or tool.function.get("output_schema") or {}
        said = f"{tool.name} {tool.function.get('description') or ''} {json.dumps(output)}"
        returned[tool.name] = {_singular(word) for word in split_words(said)}
    return any(
        {_singular(word) for word in split_words(name)} <= returned[other.name]
        for tool in tools
        for name in _list_required(tool)
        if (schema := list_properties(tool).get(name, {})).get("type") != "boolean" and "enum" not in schema
        for other in tools
        if other is not tool and name not in list_properties(other)
    )


def _singular(word: str) -> str:
    return word.removesuffix("s")


def check_tools(tools: Sequence[Tool]) -> None:
    """Check that each tool can be called.

    Raises:
        ConfigError: There are no tools, or the schema of one is invalid, refers to something that is not in it, or
            allows no arguments at all.
    """
    if not tools:
        raise ConfigError("--tools: no tools. Name a file of tools, an OpenAPI 3 document or an MCP server.")
    checked = ToolSet(tools)
    problems = []
    for tool in tools:
        if (problem := checked.find_schema_problem(tool.name)) is not None:
            problems.append(f"{problem}. Correct it.")
        elif (reference := find_unresolvable(tool.parameters)) is not None:
            problems.append(f"{tool.name}: its schema refers to {reference}, which is not in it. Correct it.")
        elif tool.function.get("parameters") is False or allows_nothing(tool.parameters):
            problems.append(f"{tool.name}: its schema allows no arguments at all, so no call is valid. Correct it.")
    if problems:
        raise ConfigError("\n".join(f"--tools: {problem}" for problem in problems))


def _list_required(tool: Tool) -> list[str]:
    """Return the parameters that a call must have."""
    required, properties = tool.parameters.get("required"), tool.parameters.get("properties")
    if not isinstance(required, list) or not isinstance(properties, dict):
        return []
    return [name for name in required if isinstance(name, str) and name in properties]


def _apportion(number: int, weights: Mapping[str, float]) -> dict[str, int]:
    """Divide a number by weights; the largest remainders get what is left."""
    total = sum(weights.values())
    exact = {name: number * weight / total for name, weight in weights.items()}
    counts = {name: int(value) for name, value in exact.items()}
    by_remainder = sorted(weights, key=lambda name: counts[name] - exact[name])
    for name in by_remainder[: number - sum(counts.values())]:
        counts[name] += 1
    return counts
