"""What in the training rows explains a fall, and the settings that treat it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from fctune.apps.gate.history import RowProfile, TrainingHistory
from fctune.apps.gate.lines import JudgedLine, Remedy
from fctune.apps.gate.replay import SOURCES, ReplayMix
from fctune.config.intervals import format_count, format_share, parse_share

_BASE_ANSWERS = "gate.base_answers"
# Shares of the rows with tools that need no call: too few, enough if more are tried, and too many.
_SAME_SHARE = 0.95  # a command has shares rounded to tenths of a percent, and the rows may have changed a little since
_FEW_NEGATIVES, _HALF_NEGATIVES, _MANY_NEGATIVES = 0.15, 0.4, 0.5
_TAKEN_AWAY = 0.3  # rows without a call that are added for each row with tools
_ENOUGH = 0.5  # of the rows that a model needs about
_FEW = 0.02  # of the rows, so that they teach nothing
_ONE_SET = 0.9  # of the rows with tools, that offer the same ones
_CALLS_TOO_MUCH = ("over_calling", "missing_tool")
_MOST_CALLED = 0.8  # of the requests with a fitting tool, in which a result calls that refuses no more than it should
_GENERAL = "GENERAL.jsonl is a file or an hf: set of what the base should keep"
_GENERAL_SHARE, _CALLS_SHARE = 0.1, 0.33


def find_remedies(line: JudgedLine, profile: RowProfile | None) -> tuple[Remedy, ...]:
    """Return what explains the fall of a line, and what treats it; always something."""
    if profile is None or not profile.num_rows:
        return (Remedy("the training rows are not known; name them with --rows to have them searched", {}),)
    few = _train_on(profile) or _add_rows(profile)
    return ((few,) if few is not None else ()) + _explain(line, profile)


def _explain(line: JudgedLine, profile: RowProfile) -> tuple[Remedy, ...]:
    cause = line.line.cause or line.line.name
    if cause in _CALLS_TOO_MUCH and (confused := _widen(profile)) is not None:
        return (confused,)
    names = _EXPLANATIONS.get(cause, ())
    found = [remedy for name in names if (remedy := name(profile)) is not None]
    own = [remedy for remedy in found if not remedy.note]  # from the rows themselves, without others to look for
    return tuple(own or found) or (_keep_base(profile),)


def _train_on(profile: RowProfile) -> Remedy | None:
    """Return the remedy of a run whose ``max_steps`` ended it long before it had read the rows."""
    if profile.max_steps is None or profile.num_passes is None or profile.num_passes >= _ENOUGH:
        return None
    return Remedy(
        f"stopped early: max_steps={profile.max_steps} ended the training after {profile.num_passes:.0%} of a pass "
        "over the rows, too soon to learn what only some of them teach",
        {"max_steps": f"{profile.max_steps / profile.num_passes:.0f}"},  # a pass
    )


def _add_rows(profile: RowProfile) -> Remedy | None:
    """Return the remedy of a run that has read far too few rows, whatever is in them."""
    if profile.rows_read >= _ENOUGH * profile.rows_needed:
        return None
    rows = format_count(profile.num_rows, "row")
    read = f", {profile.rows_read:,} with repetitions" if profile.rows_read > profile.num_rows else ""
    return Remedy(
        f"too few rows: {rows}{read}, and this model needs about {profile.rows_needed:,}. Add rows (fctune data "
        "generate writes some for your tools), or train a larger model, which needs fewer",
        {},
    )


def _widen(profile: RowProfile) -> Remedy | None:
    """Return the remedy of a result that refuses as well as calls too much: more rows without a call teach refusing."""
    called = profile.called_share
    if called is None or called >= _MOST_CALLED or _count_negatives(profile) < _FEW_NEGATIVES:
        return None
    finding = (
        f"few wordings: the result also calls nothing in {1 - called:.0%} of the held-out requests that a tool on "
        "offer answers, so that it cannot tell the two apart, and more rows without a call would teach it to refuse"
    )
    if profile.replay:
        overrides = _augment(profile, mask_names=0.3, distract=0.5, shuffle_tools=1.0)
        return Remedy(finding, overrides) if overrides else None
    return Remedy(
        finding,
        _mix_in(profile, "CALLS.jsonl", _CALLS_SHARE),
        "CALLS.jsonl is a file or an hf: set of other people's requests that call other tools",
    )


def _add_negatives(profile: RowProfile) -> Remedy | None:
    total, tried = _count_negatives(profile), profile.augment.get("take_away", 0.0)
    if total >= (_HALF_NEGATIVES if tried else _FEW_NEGATIVES):
        return None
    without = format_count(profile.counts["no_call"], "row needs", "rows need")
    distinct = len(profile.requests.no_call)
    repeated = f" and {'has' if profile.counts['no_call'] == 1 else 'have'} {distinct:,} different requests"
    why = "which did not suffice" if tried else "so that calling is nearly always right in them"
    return _take_away(
        profile,
        f"share of negatives: {without} no call{repeated if distinct < profile.counts['no_call'] else ''}, of "
        f"{profile.counts['tools']:,} rows with tools ({profile.requests.no_call_share:.1%} of the requests"
        f"{f'; {total:.1%} with those of take_away' if tried else ''}), {why}",
    )


def _add_missing(profile: RowProfile) -> Remedy | None:
    total, tried = _count_negatives(profile), profile.augment.get("take_away", 0.0)
    if tried and total >= _HALF_NEGATIVES:
        return None
    why = f"take_away={format_share(tried)} did not suffice" if tried else "no training row was made in this way"
    return _take_away(profile, f"missing tools: most of what is lost are requests whose tool was taken away, and {why}")


def _count_negatives(profile: RowProfile) -> float:
    """Return the share of requests with tools that need no call, with those that ``take_away`` added."""
    added = profile.added_share("take_away", profile.augment.get("take_away", 0.0))
    return (profile.requests.no_call_share + added) / (1 + added)


def _take_away(profile: RowProfile, finding: str) -> Remedy:
    """Return the remedy that makes rows without a call; where none can be made, they are to be written."""
    eligible = profile.added_share("take_away", 1.0)
    overrides = _augment(profile, take_away=min(1.0, _TAKEN_AWAY / eligible)) if eligible else {}
    if not overrides:
        why = profile.find_obstacle("take_away", 1.0) or "too few rows"
        return Remedy(
            f"{finding}. data.augment.take_away cannot make more of these rows ({why}): add rows that need no call, "
            "some of which ask for what no tool on offer can do",
            {},
        )
    return Remedy(finding, overrides | (_lower_rate(profile) if profile.augment.get("take_away") else {}))


def _add_questions(profile: RowProfile) -> Remedy | None:
    if profile.share("clarification", "tools") >= _FEW or profile.augment.get("ask", 0.0) > 0:
        return None
    if not (overrides := _augment(profile, ask=0.15)):
        return None
    asking = format_count(profile.counts["clarification"], "row asks", "rows ask")
    return Remedy(f"no clarifications: {asking} for a missing value, so that values are made up instead", overrides)


def _lower_negatives(profile: RowProfile) -> Remedy | None:
    share = profile.share("no_call", "tools")
    if share <= _MANY_NEGATIVES or not (overrides := _augment(profile, repeat=0.3)):
        return None
    return Remedy(
        f"share of negatives: {share:.1%} of the rows with tools need no call, so that not calling is mostly right",
        overrides,
    )


def _vary_tools(profile: RowProfile) -> Remedy | None:
    if profile.main_set_share < _ONE_SET:
        return None
    overrides = _augment(profile, mask_names=0.3, distract=0.5, shuffle_tools=0.5, paraphrase=0.3)
    if not overrides:
        return None
    return Remedy(
        f"one tool set: {profile.main_set_share:.1%} of the rows with tools offer the same ones, so that the model "
        "need not read them",
        overrides,
    )


def _add_turns(profile: RowProfile) -> Remedy | None:
    if profile.share("several_turns") >= 0.1:
        return None
    return Remedy(
        f"one turn only: {profile.share('several_turns'):.1%} of the rows have several turns of the user",
        _mix_in(profile),
        f"conversations of several turns; {_GENERAL}. fctune data generate makes some for your tools",
    )


def _add_reasoning(profile: RowProfile) -> Remedy | None:
    if not profile.base_reasons or profile.share("reasoning") >= _FEW:
        return None
    return Remedy(
        f"no reasoning: {format_count(profile.counts['reasoning'], 'row has', 'rows have')} any, so that the model "
        "learns to do without",
        _mix_in(profile),
        f"rows with reasoning; {_GENERAL}. fctune sample lets the base write them for your own cases",
    )


def _add_texts(profile: RowProfile) -> Remedy | None:
    if profile.share("no_tools") >= 0.05 or profile.replay:
        return None
    return Remedy(
        f"tool calls only: {profile.share('no_tools'):.1%} of the rows are without tools", _mix_in(profile), _GENERAL
    )


def _keep_base(profile: RowProfile) -> Remedy:
    lowered = _lower_rate(profile)
    return Remedy(
        f"nothing that is searched for in the {profile.num_rows:,} rows of {profile.source} explains it; a smaller "
        "learning rate, fewer epochs and general rows (data.replay) keep more of the base",
        lowered or _mix_in(profile),
        "" if lowered else _GENERAL,
    )


def _mix_in(profile: RowProfile, name: str = "GENERAL.jsonl", share: float = _GENERAL_SHARE) -> dict[str, str]:
    """Return overrides that mix in rows of a file, as a share of the training rows, besides the user's own replay."""
    mix = ReplayMix.read(profile.replay) if profile.replay else ReplayMix()
    mix.add({"path": name}, share / (1 - share))
    return mix.to_overrides()


def _lower_rate(profile: RowProfile) -> dict[str, str]:
    """Return the override that takes a quarter of the learning rate; none if that is unknown."""
    return {"optimizer.lr": f"{profile.learning_rate / 4:.3g}"} if profile.learning_rate else {}


def _augment(profile: RowProfile, **shares: float) -> dict[str, str]:
    """Return overrides that raise kinds to a share, or beyond the one that did not suffice; of those that the augmenter
    can apply to the rows, since a run refuses the others.
    """
    raised = {}
    for kind, least in shares.items():
        given = profile.augment.get(kind, 0.0)
        share = least if given < _SAME_SHARE * least else min(1.0, 2 * given)
        if profile.find_obstacle(kind, share) is None:
            raised[f"data.augment.{kind}"] = format_share(share)
    return raised


_EXPLANATIONS: dict[str, tuple[Callable[[RowProfile], Remedy | None], ...]] = {
    "over_calling": (_add_negatives, _add_questions, _vary_tools),
    "missing_tool": (_add_missing, _vary_tools),
    "over_refusing": (_lower_negatives, _vary_tools),
    "calls": (_vary_tools, _lower_negatives, _add_turns),
    "asking": (_add_questions, _add_negatives),
    "multi_turn": (_add_turns, _add_texts),
    "reasoning": (_add_reasoning,),
    "abandoned": (_add_reasoning, _add_texts),
    "malformed": (_add_negatives, _vary_tools, _add_texts),
    "invented_tool": (_vary_tools, _add_negatives),
    "invented_argument": (_add_questions, _vary_tools),
    "text": (_add_texts,),
}
"""Explanations to look for by the cause of a line (``Line.cause``), the most likely first."""


def combine(lines: Iterable[JudgedLine]) -> dict[str, str]:
    """Return the overrides of all remedies; of several shares of one kind, the largest."""
    combined: dict[str, str] = {}
    given = [remedy.overrides for line in lines for remedy in line.remedies]
    for overrides in given:
        for key, value in overrides.items():
            if key in combined and value.endswith("%") and combined[key].endswith("%"):
                value = max(value, combined[key], key=parse_share)
            combined[key] = value
    mixed = [overrides for overrides in given if SOURCES in overrides]
    return combined | (ReplayMix.combine(mixed).to_overrides() if mixed else {})


def make_commands(overrides: Mapping[str, str], history: TrainingHistory | None, gate: Path) -> list[str]:
    """Return the command that trains the result again with the remedies; none without any.

    Args:
        overrides: The remedies.
        history: Training of the result.
        gate: Directory of this gate, whose answers of the base a tune need not ask for again.
    """
    if not overrides:
        return []
    words = [f"{key}={value}" for key, value in overrides.items()]
    if history is None or history.command is None or history.output_dir is None:
        return [shlex.join(["fctune", "train", "CONFIG", "output_dir=NEW_DIRECTORY", *words])]
    own = {"output_dir", *overrides}
    kept = [word for word in history.command if word.partition("=")[0] not in own]
    if kept[:2] == ["fctune", "tune"]:  # whose --out holds the run's directory
        places = [index for index, word in enumerate(kept) if word == "--out"]
        dropped = {*places, *(index + 1 for index in places)}
        replaced = ("--out=", f"{_BASE_ANSWERS}=")
        kept = [word for index, word in enumerate(kept) if index not in dropped and not word.startswith(replaced)]
        out = f"{Path(history.output_dir).parent}_mended"
        return [shlex.join([*kept, "--out", out, *words, f"{_BASE_ANSWERS}={gate}"])]
    return [shlex.join([*kept, f"output_dir={history.output_dir.rstrip('/')}_mended", *words])]
