"""Config of a tune: the shipped config of a model like this one, on the user's rows, and what follows from them.

Every value carries the reason for it, which the written config shows as its comment.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import yaml

from fctune.apps.tune.machine import Machine
from fctune.base.errors import ConfigError
from fctune.config.composition import Composition, render_with_origins
from fctune.config.intervals import AUTO, format_count
from fctune.config.loading import compose_config, format_problems, parse_config
from fctune.config.run_length import USUAL_STEPS
from fctune.config.schema import RunConfig
from fctune.config.sections.data import DataConfig, SourceConfig
from fctune.config.shipped import list_shipped_configs, resolve_shipped_path
from fctune.config.yaml_text import dump_yaml
from fctune.data.data_size import count_steps
from fctune.data.row_lengths import MIN_SEQ_LEN, RowLengths, choose_seq_len
from fctune.models.architecture import TINY_ROWS, TINY_WEIGHTS, Architecture, count_weights
from fctune.models.hub import parse_name
from fctune.models.planned_model import extend_architecture, find_architecture
from fctune.parallel.search import LayoutSearch, Variant, list_overrides

# Held-out cases that are aimed at: 200 pairs show a fall of about 10 points, 600 one of 5, which a thorough gate looks
# for. Of few rows, a fifth at most is held out.
_HELD_OUT, _THOROUGH_HELD_OUT, _MAX_SHARE, _MIN_SHARE = 200, 600, 0.2, 0.02
_TINY_EPOCHS = 10  # a real model knows language, and needs fewer passes
_EPOCHS = ((1_000, 4), (5_000, 3), (50_000, 2))  # of fewer conversations than this; of more, one
# Below this share of rows without a call, this share of the others is made into some.
_FEW_NO_CALLS, _TAKE_AWAY = 0.1, "30%"
_MIN_ANSWER, _THINKING = 256, 1024  # tokens of an answer of the gate, and of its reasoning
_OTHER_FAMILY = math.log(4)  # how much nearer in size a model of another family must be
_ALTERNATIVES = {"global_batch_size": "global_batch_tokens"}  # by key; only one of both may be set
_NOT_TAKEN = ("success", "telemetry", "eval", "price_per_gpu_hour", "currency")


@dataclass(frozen=True, slots=True)
class RowFacts:
    """Counts from the check of the rows that the config depends on."""

    conversations: int
    tokens: int
    longest: int  # tokens of a row that holds the longest conversation
    seq_len: int | None = None  # as chosen by the rows and the machine; None: by an older version
    length_reason: str = ""
    no_calls: int = 0  # conversations with tools that call none
    no_tools: int = 0  # conversations without tools
    requests: int | None = None  # distinct ones of conversations with tools; None: each has its own
    no_call_requests: int | None = None  # distinct ones of those that call none


@dataclass(frozen=True, slots=True)
class PreparedFacts:
    """Counts of the prepared set, which has augmented rows and none that are held out."""

    packs: int
    tokens: int
    held_out: int  # as the split prints it
    cases: int  # that the gate can ask
    answer_tokens: int = 0  # of the longest held-out answer; 0: unknown
    prints_reasoning: bool = False  # the model's template does


@dataclass(frozen=True)
class Shipped:
    """A shipped LoRA config and the model that it trains, whose sizes are read when they are asked for."""

    name: str
    path: Path
    model: str

    @cached_property
    def family(self) -> str:
        """Value of ``model_type`` in the model's config.json."""
        return _family(self.found[0])

    @cached_property
    def num_weights(self) -> int:
        """Number of the model's weights, adapters not counted."""
        return count_weights(self.found[0])

    @cached_property
    def found(self) -> tuple[Architecture, Path | None, str]:
        """The model, as ``find_architecture`` returns it."""
        return find_architecture(resolve_shipped_path(self.model))


class Draft:
    """A config in the making. A key that the user gave is never chosen."""

    def __init__(self, composition: Composition, given: Sequence[str]):
        self.composition = composition
        self._problems: list[str] = []
        self._given = [key for word in given for key in _list_keys(word)]
        for key, other in _ALTERNATIVES.items():
            if self.is_given(other) and not self.is_given(key):
                composition.values.pop(key, None)
        composition.apply_overrides(given, self._problems)
        if (data := composition.values.get("data") or {}).get("seq_len") == AUTO:  # as it is without
            del data["seq_len"]
            self._given = [key for key in self._given if key != "data.seq_len"]

    def is_given(self, key: str) -> bool:
        """Return True if the user gave a dotted key, a part of it, or the section that it is in."""
        return any(f"{given}.".startswith(f"{key}.") or f"{key}.".startswith(f"{given}.") for given in self._given)

    def choose(self, key: str, value: Any, reason: str) -> None:
        """Set a dotted key, unless the user gave it or a part of it, or the key that takes its place."""
        if self.is_given(key) or (key in _ALTERNATIVES and self.is_given(_ALTERNATIVES[key])):
            return
        self.composition.apply_overrides([f"{key}={dump_yaml(value)}"], self._problems, reason)

    def drop(self, key: str) -> None:
        """Remove a top-level section, unless the user gave a part of it."""
        if not any(given.partition(".")[0] == key for given in self._given):
            self.composition.values.pop(key, None)

    def parse(self) -> RunConfig:
        """Return the run's config with all choices and what the user gave.

        Raises:
            ConfigError: Values that the user gave are wrong; all of them.
        """
        problems = list(self._problems)
        config = parse_config(self.composition.values, problems)
        if problems or config is None:
            raise ConfigError(format_problems("fctune tune", problems))
        return config

    @property
    def values(self) -> dict[str, Any]:
        """The config's values, in the order of the reference."""
        values = _sort(self.composition.values, RunConfig)
        return values | {"data": _sort(values["data"], DataConfig)} if "data" in values else values

    def render(self, head: str) -> str:
        """Return the config as YAML: the lines of ``head`` as comments, then each value with its reason."""
        comment = "".join(f"# {line}".rstrip() + "\n" for line in head.splitlines())
        return f"{comment}\n{render_with_origins(self.values, self.composition)}"

    def list_choices(self) -> list[tuple[str, str, str]]:
        """Return key, value and reason of what was chosen or given, without what a shipped config says."""
        return [
            (".".join(map(str, path)), dump_yaml(value).strip(), origin)
            for path, value in _iter_values(self.values, ())
            if (origin := self.composition.origin_of(path)) is not None and not origin.endswith(".yaml")
        ]


def _list_keys(override: str) -> list[str]:
    """Return the dotted keys that an override gives: of ``gate={max_cases: 60}``, those in the section."""
    key, _, text = override.removeprefix("~").partition("=")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:  # which applying it reports
        return [key]
    paths = _iter_values(value, (key,)) if isinstance(value, dict) else [((key,), value)]
    return [".".join(map(str, path)) for path, _ in paths]


def _sort(values: dict[str, Any], schema: type[Any]) -> dict[str, Any]:
    return {field.name: values[field.name] for field in fields(schema) if field.name in values}


def _iter_values(value: Any, path: tuple[str | int, ...]) -> Any:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not value or not items or (isinstance(value, list) and not any(isinstance(item, dict) for item in value)):
        yield path, value
        return
    for name, item in items:
        yield from _iter_values(item, (*path, name))


def draft_config(
    model: str,
    architecture: Architecture,
    machine: Machine,
    out: Path,
    sources: Sequence[SourceConfig],
    given: Sequence[str],
) -> tuple[Draft, Shipped]:
    """Draft the config of a model: the nearest shipped config, on these rows alone.

    Args:
        model: Path or name of the model.
        architecture: Its sizes.
        machine: What it is trained on.
        out: Directory of the run.
        sources: The user's rows.
        given: ``key=value`` overrides of the user.
    """
    shipped, reason = choose_shipped(model, architecture)
    composition = compose_config(shipped.path, RunConfig)
    for path, origin in composition.origins.items():
        composition.origins[path] = f"configs/{origin.rpartition('configs/')[2]}"
    composition.values.get("data", {}).pop("sources", None)
    if "modules" in (adapter := composition.values.get("adapter", {})) and shipped.family != _family(architecture):
        del adapter["modules"]  # another family's names
    draft = Draft(composition, given)
    for key in _NOT_TAKEN:
        draft.drop(key)
    draft.choose("output_dir", str(out), "the run's directory in --out")
    draft.choose("model.path", model, "--model" if shipped.num_weights > TINY_WEIGHTS else "the built-in model")
    if not _is_same_model(model, shipped.model):
        composition.values["model"] = {
            key: value for key, value in composition.values["model"].items() if key == "path" or key in _keys(given)
        }
    draft.choose("data.sources", [_describe_source(source) for source in sources], "--data")
    draft.choose("adapter.rank", composition.values["adapter"].get("rank", 32), reason)
    if not machine.num_gpus:
        why = "no GPU"
        if machine.prefers_bf16 and shipped.num_weights > TINY_WEIGHTS:
            draft.choose("precision", "bf16", f"{why}: these processors multiply it much faster than fp32")
        else:
            draft.choose("precision", "fp32", f"{why}: bf16 is no faster on these processors, or the model is tiny")
        draft.choose("compile", False, f"{why}: compiling takes longer than it saves")
        draft.choose("parallel.mode", "auto", "one process")
        if composition.values["adapter"].get("base", "bf16") != "bf16":
            draft.choose("adapter.base", "bf16", f"{why}: stored as precision says")
        draft.choose("gate.benchmarks", [], f"{why}: a benchmark would take hours; the held-out rows are measured")
        draft.choose("gate.batch_size", 16, f"{why}: the memory of long prompts is shared with everything else")
    return draft, shipped


def _keys(given: Sequence[str]) -> set[str]:
    """Return the keys of the model section that the user gave."""
    words = (word.removeprefix("~").partition("=")[0].split(".") for word in given)
    return {parts[1] for parts in words if parts[0] == "model" and len(parts) > 1}


def _describe_source(source: SourceConfig) -> dict[str, Any]:
    """Return the keys of a source that differ from their defaults."""
    plain = SourceConfig(path=source.path)
    keys = ("format", "columns", "fold", "where", "failed", "wrong_turns")
    changed = {key: value for key in keys if (value := getattr(source, key)) != getattr(plain, key)}
    return {"path": source.path, **changed}


def size_config(
    draft: Draft,
    facts: RowFacts,
    architecture: Architecture,
    machine: Machine,
    has_cases: bool,
    prepared: PreparedFacts | None = None,
) -> None:
    """Choose what depends on the number and the length of the rows; with the prepared set, its numbers are exact."""
    usual = _count_step_tokens(draft.parse())
    rows = format_count(facts.conversations, "row")
    limit = architecture.max_position_embeddings
    seq_len, reason = facts.seq_len, facts.length_reason
    if seq_len is None:
        seq_len, _ = choose_seq_len(RowLengths({facts.longest: (1, 1)}), limit)
        reason = f"the longest row has {format_count(facts.longest, 'token')}"
    draft.choose("data.seq_len", seq_len, reason)
    if facts.longest <= draft.parse().data.row_tokens:
        draft.choose("data.overlong", "fail", "no row is longer than seq_len")
    elif draft.parse().data.train_reasoning == "last":
        draft.choose("data.overlong", "drop", "longer rows are left out and counted: parts lack the last request")
    else:
        draft.choose("data.overlong", "split_turns", "longer rows become parts, each with the turns before it")
    requests = facts.conversations - facts.no_tools if facts.requests is None else facts.requests
    no_calls = facts.no_calls if facts.no_call_requests is None else facts.no_call_requests
    if no_calls < _FEW_NO_CALLS * requests:
        what = "row" if requests == facts.conversations - facts.no_tools else "different request"
        why = f"{no_calls:,} of {format_count(requests, what)} with tools {'calls' if no_calls == 1 else 'call'} none"
        draft.choose("data.augment.take_away", _TAKE_AWAY, f"{why}; without such rows a model calls always")
    if has_cases:
        draft.choose("data.validation_share", 0.0, "--cases gives the held-out cases")
    else:
        gate = draft.parse().gate
        wanted = _THOROUGH_HELD_OUT if gate is not None and gate.thorough else _HELD_OUT
        share = min(_MAX_SHARE, max(_MIN_SHARE, round(wanted / facts.conversations, 3)))
        count = f"about {share * facts.conversations:,.0f} of {rows} held out for the gate"
        if prepared is not None:
            count = f"{prepared.held_out:,} of {rows} held out, {format_count(prepared.cases, 'case')} for the gate"
        draft.choose("data.validation_share", share, f"{count}; never trained on")
    if prepared is not None and prepared.answer_tokens:
        wanted = max(_MIN_ANSWER, 64 * math.ceil(1.25 * prepared.answer_tokens / 64))
        wanted += _THINKING if prepared.prints_reasoning else 0
        room = max(_MIN_ANSWER, limit - facts.longest)  # a prompt that leaves too little is not asked
        why = f"the longest held-out answer has {format_count(prepared.answer_tokens, 'token')}"
        more = ", and the model may think" if prepared.prints_reasoning else ""
        draft.choose("gate.max_new_tokens", min(wanted, room), f"{why}{more}")
    is_tiny = count_weights(architecture) < TINY_WEIGHTS
    if is_tiny:
        epochs = min(_TINY_EPOCHS, max(1, round(TINY_ROWS / facts.conversations)))
        draft.choose("epochs", epochs, f"{rows}; the tiny model needs about {TINY_ROWS:,}, repeated or not")
    else:
        epochs = next((epochs for rows_below, epochs in _EPOCHS if facts.conversations < rows_below), 1)
        draft.choose("epochs", epochs, f"{rows}; fewer rows are read more often")
    config = draft.parse()
    tokens = facts.tokens * (1 - config.data.validation_share) if prepared is None else prepared.tokens
    total = int(tokens * config.epochs)
    most = max(1, min(usual, total // USUAL_STEPS) // config.data.row_tokens)
    batch = max(machine.num_processes, 2 ** int(math.log2(most)))
    if prepared is None:
        steps, about = math.ceil(total / (batch * config.data.row_tokens)), "about "
    else:
        steps, about = count_steps(replace(config, global_batch_size=batch), prepared.packs), ""
    draft.choose("global_batch_size", batch, f"packs of seq_len tokens; {about}{format_count(steps, 'step')}")
    steps = math.ceil(total / _count_step_tokens(draft.parse()))
    steps = min(steps, config.max_steps or steps)
    draft.choose("lr_scheduler.warmup", "5%", "of the steps, however few they are")
    draft.choose("validation.every", "25%", "of the steps; the gate measures the calls")
    draft.choose("log_every_n_steps", max(1, steps // 20), "about twenty lines")


def _count_step_tokens(config: RunConfig) -> int:
    return config.global_batch_tokens or config.global_batch_size * config.data.row_tokens


def fit_config(draft: Draft, architecture: Architecture, model_dir: Path | None, machine: Machine) -> Variant | None:
    """Choose micro-batch, recomputation, layout and storage of the base by what fits; None if nothing does."""
    found, is_quantized = find_fit(draft.parse(), architecture, model_dir, machine), False
    can_quantize = machine.num_gpus and not architecture.expert_names
    if found is None and can_quantize and draft.parse().adapter is not None:
        draft.choose("adapter.base", "nf4", f"in bf16 the base does not fit in {machine.describe()}")
        found, is_quantized = find_fit(draft.parse(), architecture, model_dir, machine), True
    if found is None:
        return None
    what = "the fastest that fits" + (" with a base in 4 bits" if is_quantized else "")
    gib = found.peak.footprint.total / 1024**3
    # Equal micro-batches, as compiled code wants them.
    setting = replace(found.setting, micro_batch_size=2 ** int(math.log2(found.setting.micro_batch_size)))
    shared = {"parallel.context": setting.context, "activation_checkpointing.mlp_tiles": setting.mlp_tiles}
    chosen = shared | list_overrides(draft.parse(), setting)
    for key, value in chosen.items():
        if not (key == "parallel.mode" and machine.num_gpus <= 1):
            draft.choose(key, value, f"{what}: {gib:.1f} GiB of {machine.gpu.memory_bytes / 1024**3:.1f}")
    return found


def find_fit(config: RunConfig, architecture: Architecture, model_dir: Path | None, machine: Machine) -> Variant | None:
    """Return the fastest setting of a config that fits on a machine; None if none does."""
    extended, model_dir = extend_architecture(config, architecture, model_dir)
    search = LayoutSearch(config, extended, model_dir, machine.gpu, 1, machine.num_processes)
    fitting = [variant for variant in search.variants(1) if variant.fits]
    return max(fitting, key=lambda variant: variant.tokens_per_s_per_gpu, default=None)


@cache  # reads all configs, for each draft of a config
def list_shipped() -> tuple[Shipped, ...]:
    """Return the shipped configs for supervised LoRA, one of each model."""
    found: dict[str, Shipped] = {}
    for path in list_shipped_configs():
        values = compose_config(path, RunConfig).values
        if "adapter" not in values or not values.get("data") or {"preference", "grpo", "distill"} & values.keys():
            continue
        model = str(values["model"]["path"])
        name = parse_name(model)
        model = f"hf:{name[0]}" if name else model
        # Of two configs of a model, the first one by name has the base in the run's precision.
        found.setdefault(model, Shipped(path.stem, path, model))
    return tuple(found.values())


def choose_shipped(model: str, architecture: Architecture) -> tuple[Shipped, str]:
    """Choose the shipped config of a model, or of the nearest, preferring its family; returns it with the reason."""
    exact = next((shipped for shipped in list_shipped() if _is_same_model(model, shipped.model)), None)
    if exact is not None:
        return exact, f"as {exact.name}.yaml, the shipped config of this model"
    num_weights, family = count_weights(architecture), _family(architecture)

    def distance(shipped: Shipped) -> float:
        of_size = abs(math.log(shipped.num_weights / num_weights))
        return of_size + (0 if shipped.family == family else _OTHER_FAMILY)

    # Of equally near ones the larger model's.
    nearest = min(list_shipped(), key=lambda shipped: (distance(shipped), -shipped.num_weights))
    relation = "the same family" if nearest.family == family else "the nearest size"
    sizes = f"{format_weights(nearest.num_weights)}, this one has {format_weights(num_weights)}"
    return nearest, f"as {nearest.name}.yaml, {relation} ({sizes})"


def find_smaller(architecture: Architecture, machine: Machine) -> list[str]:
    """Return the two largest shipped models, smaller than this one, that a machine can train; its own family first."""
    family, num_weights = _family(architecture), count_weights(architecture)
    smaller = [s for s in list_shipped() if s.num_weights < num_weights]
    rows = [SourceConfig(path="synthetic:train:1")]  # of the length in the config, whatever they are
    found: list[str] = []
    for shipped in sorted(smaller, key=lambda s: (s.family != family, -s.num_weights)):
        if shipped.num_weights > machine.num_processes * machine.gpu.memory_bytes:  # half a byte each is not enough
            continue
        other, directory, _ = shipped.found
        draft, _ = draft_config(shipped.model, other, machine, Path("runs"), rows, [f"data.seq_len={MIN_SEQ_LEN}"])
        draft.choose("global_batch_size", machine.num_processes, "")
        if fit_config(draft, other, directory, machine) is not None:
            found.append(shipped.model)
        if len(found) == 2:
            break
    return found


def format_weights(count: int) -> str:
    """Return a number of weights as models are named: 0.6B, 270M."""
    return f"{count / 1e9:.1f}B" if count >= 5e8 else f"{count / 1e6:.0f}M"


def _family(architecture: Architecture) -> str:
    """Return the architecture's ``model_type``."""
    return str(getattr(architecture, "family", None) or getattr(architecture, "model_type", ""))


def _is_same_model(model: str, shipped: str) -> bool:
    name, other = parse_name(model), parse_name(shipped)
    if name is None or other is None:
        return (
            name is other
            and Path(resolve_shipped_path(model)).resolve() == Path(resolve_shipped_path(shipped)).resolve()
        )
    return name[0].lower() == other[0].lower()
