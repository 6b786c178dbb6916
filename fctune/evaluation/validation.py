"""Whether an exported model directory is whole, right and of use: each check with what it found."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fctune.calls.formats.base import CallFormat
from fctune.calls.formats.registry import detect_format, get_format
from fctune.data.chat_template import ChatTemplate
from fctune.data.conversation import Conversation
from fctune.errors import CheckpointError, ConfigError, DataError
from fctune.evaluation.suites import Suite
from fctune.generation.in_process import InProcessEngine
from fctune.generation.model_files import ModelFiles

Status = Literal["ok", "failed", "skipped"]

_NUM_SHOWN = 3
_INDEX = "model.safetensors.index.json"
# Mean divergence of next-token distributions that rounding explains: merging rounds weights once more in 16 bits.
_MAX_KL = {torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 1e-3}


@dataclass(frozen=True, slots=True)
class Check:
    """One check: whether it held, and what was found in either case."""

    name: str
    status: Status
    detail: str


class _BrokenError(Exception):
    """A check that does not hold; the message is what was found."""


@dataclass(slots=True)
class Validator:
    """The checks of a model directory, in an order in which each can rely on those before it.

    Args:
        model_dir: What is checked.
        like: The checkpoint it was exported from, whose logits it is to have; or None.
        format_name: The wire format it is to have; None: whatever its template has.
        suite: What it is to call tools for; None: it is not asked.
        max_kl: The most that logits may differ, as mean Kullback-Leibler divergence in nats; None: by the dtype.
        max_new_tokens: The most that an answer may be.
    """

    model_dir: Path
    like: ModelFiles | None = None
    format_name: str | None = None
    suite: Suite | None = None
    max_kl: float | None = None
    max_new_tokens: int = 256
    _engine: InProcessEngine | None = field(default=None, init=False)

    def run(self) -> Iterator[Check]:
        """Every check as it is made; where one fails, those that need what it checks are skipped."""
        steps: list[tuple[str, Callable[[], str | None], str]] = [
            ("files", self._check_files, ""),
            ("weights", self._check_weights, "files"),
            ("values", self._check_values, "weights"),
            ("template", self._check_template, "files"),
            ("stops", self._check_stops, "template"),
            ("loads", self._check_loads, "weights template"),
            ("logits", self._check_logits, "loads"),
            ("calls", self._check_calls, "loads"),
        ]
        held: set[str] = set()
        for name, check, needs in steps:
            if lacking := [need for need in needs.split() if need not in held]:
                yield Check(name, "skipped", f"needs {' and '.join(lacking)}")
                continue
            try:
                found = check()
            except (_BrokenError, ConfigError, DataError, CheckpointError) as error:
                yield Check(name, "failed", str(error))
                continue
            if found is not None:
                held.add(name)
            yield Check(name, "skipped" if found is None else "ok", found or "not asked for")

    def _check_files(self) -> str:
        needed = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
        missing = [name for name in needed if not (self.model_dir / name).is_file()]
        weights = sorted(file.name for file in self.model_dir.glob("*.safetensors"))
        if not weights:
            missing.append("*.safetensors")
        if missing:
            raise _BrokenError(f"missing: {', '.join(missing)}")
        for name in needed:
            _read_json(self.model_dir / name)
        return f"{len(needed)} files and {_count(len(weights), 'file')} of weights"

    def _check_weights(self) -> str:
        """The files hold what their index says, and what a model of this config has, in its shapes."""
        shapes = self._read_shapes()
        expected, tied = _expected_shapes(self.model_dir)
        wrong = [
            f"{name} is {list(shapes[name])}, the config makes it {list(shape)}"
            for name, shape in expected.items()
            if name in shapes and shapes[name] != shape
        ]
        wrong += [
            f"{name} is missing"
            for name in expected
            if name not in shapes and not tied.get(name, set()) & shapes.keys()
        ]
        wrong += [f"{name} is in no model of this config" for name in shapes if name not in expected]
        _raise_some(wrong)
        count = sum(math.prod(shape) for shape in shapes.values())
        return f"{_count(len(shapes), 'tensor')}, {count:,} values, in the shapes of the config"

    def _read_shapes(self) -> dict[str, tuple[int, ...]]:
        files = {file.name: file for file in self.model_dir.glob("*.safetensors")}
        shapes: dict[str, tuple[int, ...]] = {}
        homes: dict[str, str] = {}
        wrong: list[str] = []
        for name, file in sorted(files.items()):
            try:
                with safe_open(str(file), framework="pt") as opened:
                    keys = opened.keys()
                    for key in keys:
                        wrong += [f"{key} is in {homes[key]} and in {name}"] if key in homes else []
                        homes[key] = name
                        shapes[key] = tuple(opened.get_slice(key).get_shape())
            except (SafetensorError, OSError) as error:
                wrong.append(f"{name} cannot be read ({error})")
        if (self.model_dir / _INDEX).is_file():
            weight_map = _read_json(self.model_dir / _INDEX).get("weight_map")
            if not isinstance(weight_map, dict):
                raise _BrokenError(f"{_INDEX} has no weight_map")
            wrong += [
                f"{name}, which the index names, is not there"
                for name in sorted(set(weight_map.values()) - files.keys())
            ]
            wrong += [f"{name} is not in the index" for name in sorted(files.keys() - set(weight_map.values()))]
            wrong += [
                f"{key} is said to be in {name} and is {'in ' + homes[key] if key in homes else 'nowhere'}"
                for key, name in weight_map.items()
                if name in files and homes.get(key) != name
            ]
            wrong += [f"{key} in {home} is not in the index" for key, home in homes.items() if key not in weight_map]
        elif list(files) != ["model.safetensors"]:
            wrong.append(f"{_count(len(files), 'file')} of weights and no {_INDEX}")
        _raise_some(wrong)
        return shapes

    def _check_values(self) -> str:
        """No weight is NaN or infinite, and no matrix is all zero, as one that was never written is."""
        wrong, count, dtypes = [], 0, set()
        for name, tensor in self._tensors():
            count += 1
            dtypes.add(str(tensor.dtype).removeprefix("torch."))
            if tensor.is_floating_point():
                # One pass: a sum is finite only if all values are, unless huge ones overflow it.
                if not tensor.double().sum().isfinite() and (bad := int((~tensor.isfinite()).sum())):
                    wrong.append(f"{name} has {bad:,} values that are not finite")
                elif tensor.ndim > 1 and not tensor.any():
                    wrong.append(f"{name} is all zero")
        _raise_some(wrong)
        return f"{_count(count, 'tensor')} finite, {' and '.join(sorted(dtypes))}"

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for file in sorted(self.model_dir.glob("*.safetensors")):
            with safe_open(str(file), framework="pt") as opened:
                keys = opened.keys()
                for key in keys:
                    yield key, opened.get_tensor(key)

    def _check_template(self) -> str:
        template = ChatTemplate(self.model_dir)
        found = detect_format(template.source) if self.format_name is None else self._named_format(template)
        vocab = _read_json(self.model_dir / "config.json").get("vocab_size")
        if isinstance(vocab, int) and len(template.tokenizer) > vocab:
            raise _BrokenError(f"the tokenizer has {len(template.tokenizer):,} tokens, the model {vocab:,}")
        if self.like is not None:
            origin = ChatTemplate(self.like.model_dir)
            if origin.source != template.source:
                raise _BrokenError(f"the chat template is not that of {self.like.model_dir}")
            if origin.tokenizer.get_vocab() != template.tokenizer.get_vocab():
                raise _BrokenError(f"the tokenizer's vocabulary is not that of {self.like.model_dir}")
        same = "" if self.like is None else f", as {self.like.model_dir} has it"
        return f"renders tools, calls and results; writes calls as {found.name}{same}"

    def _named_format(self, template: ChatTemplate) -> CallFormat:
        named, found = get_format(self.format_name or ""), detect_format(template.source)
        if named.name != found.name:
            raise _BrokenError(f"the chat template writes calls as {found.name}, not as {named.name}")
        return named

    def _check_stops(self) -> str:
        """Servers stop at the end tokens of the generation config, whatever the template ends a turn with."""
        stops = _read_json(self.model_dir / "generation_config.json").get("eos_token_id")
        known = set(stops if isinstance(stops, list) else [stops])
        template = ChatTemplate(self.model_dir)
        names = {i: template.tokenizer.convert_ids_to_tokens(i) for i in template.stop_ids}
        if missing := [f"{name} ({i})" for i, name in sorted(names.items()) if i not in known]:
            raise _BrokenError(
                f"the template ends a turn with {' and '.join(missing)}, which generation_config.json's eos_token_id "
                f"({stops}) lacks: a server would not stop there"
            )
        return f"at {' and '.join(names[i] for i in sorted(names))}, in the generation config too"

    def _check_loads(self) -> str:
        self._engine = InProcessEngine(self.model_dir)
        return f"{type(self._engine.model).__name__} in transformers, on {self._engine.device}"

    def _check_logits(self) -> str | None:
        """The same next-token distributions as the model it is said to be."""
        if self.like is None:
            return None
        assert self._engine is not None
        other = InProcessEngine(*self.like)
        prompts = _probe_prompts(self.suite)
        encoded = [self._engine.template.encode_prompt(prompt) for prompt in prompts]
        kl, agreed, count, gap = 0.0, 0, 0, 0.0
        for ids in encoded:
            ours, theirs = (_log_probabilities(engine, ids) for engine in (self._engine, other))
            kl += float((theirs.exp() * (theirs - ours)).sum())
            agreed += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
            gap = max(gap, float((ours - theirs).abs().max()))
            count += len(ids)
        limit = self.max_kl if self.max_kl is not None else _MAX_KL.get(self._engine.model.dtype, 5e-3)
        found = f"mean KL {kl / count:.2e} nats over {count:,} positions, same first choice at {agreed / count:.1%}"
        # NaN is under no limit.
        if not kl / count <= limit:
            named = " + ".join(map(str, filter(None, self.like)))
            raise _BrokenError(f"{found}: over {limit:g}, so this is another model than {named}")
        return f"{found}, largest gap {gap:.2e}"

    def _check_calls(self) -> str | None:
        """It answers at least one question that a call is due for with a well-formed call of a tool on offer."""
        if self.suite is None:
            return None
        assert self._engine is not None
        cases = [case for case in self.suite.cases if case.expected]
        reader = (
            detect_format(self._engine.template.source) if self.format_name is None else get_format(self.format_name)
        )
        called = right = 0
        for answer in self._engine.answer([case.prompt for case in cases], self.max_new_tokens):
            case = cases[answer.index]
            parsed = reader.parse(answer.text, case.prompt.tools)
            offered = {tool.name for tool in case.prompt.tools}
            called += bool(parsed.calls) and not parsed.malformed and all(call.name in offered for call in parsed.calls)
            right += self.suite.judge(case, parsed)[0].is_correct
        whose = f"{called} of {len(cases)} questions of {self.suite.name}"
        found = f"{whose} get a well-formed call of a tool on offer, {right} the right one"
        if not called:
            raise _BrokenError(found)
        return found


def _probe_prompts(suite: Suite | None, num_prompts: int = 4) -> list[Conversation]:
    from fctune.data.synthetic import iter_conversations

    if suite is not None:
        return [case.prompt for case in suite.cases[:num_prompts]]
    return list(iter_conversations("train", num_prompts, seed=0))


@torch.no_grad()
def _log_probabilities(engine: InProcessEngine, ids: list[int]) -> Tensor:
    logits: Tensor = engine.model(input_ids=torch.tensor([ids], device=engine.device)).logits[0]
    return logits.double().log_softmax(-1).cpu()


def _expected_shapes(model_dir: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, set[str]]]:
    """Names and shapes of the tensors of a model of this config, and for each the other names that its weight has."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(str(model_dir), local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # whatever a broken config makes the library raise
        reason = " ".join(str(error).split())[:200]
        raise _BrokenError(f"no model can be made of config.json ({type(error).__name__}: {reason})") from None
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    names: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    return shapes, {name: group - {name} for group in names.values() for name in group}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _BrokenError(f"{path.name} cannot be read ({error})") from None
    if not isinstance(value, dict):
        raise _BrokenError(f"{path.name} is no object")
    return value


def _raise_some(wrong: Sequence[str]) -> None:
    if wrong:
        rest = f"; and {len(wrong) - _NUM_SHOWN:,} more" if len(wrong) > _NUM_SHOWN else ""
        raise _BrokenError("; ".join(wrong[:_NUM_SHOWN]) + rest)


def _count(n: int, noun: str) -> str:
    return f"1 {noun}" if n == 1 else f"{n:,} {noun}s"
