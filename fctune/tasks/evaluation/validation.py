"""Validate an exported model directory: each check with its finding."""

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

from fctune.base.errors import CheckpointError, ConfigError, DataError, one_line
from fctune.calls.formats.base import CallFormat
from fctune.calls.formats.registry import get_format
from fctune.calls.response_template import KEY as RESPONSE_KEY
from fctune.calls.response_template import find_call_format, iter_seeded_answers, read_answer
from fctune.config.intervals import format_count
from fctune.data.chat_template import ChatTemplate
from fctune.data.conversation import Conversation
from fctune.engines.local import LocalEngine
from fctune.engines.model_files import ModelFiles
from fctune.tasks.evaluation.run import ask_cases
from fctune.tasks.suite import Suite

Status = Literal["ok", "failed", "skipped"]

_NUM_SHOWN = 3
_NUM_PROBES = 4
_INDEX = "model.safetensors.index.json"
# Mean divergence of next-token distributions explained by rounding: merging rounds 16-bit weights once more.
_MAX_KL = {torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 1e-3}


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check, with what was found."""

    name: str
    status: Status
    detail: str


class _CheckFailedError(Exception):
    """A check failed; the message is what was found."""


@dataclass(slots=True)
class Validator:
    """Checks of a model directory, ordered so that each can rely on those before it.

    Args:
        model_dir: The directory to check.
        like: The checkpoint it was exported from, whose logits it should reproduce; None to skip that check.
        format_name: The call format it should have; None: the one of its chat template.
        suite: Cases in which it should call tools; None to skip that check.
        max_kl: Maximum mean Kullback-Leibler divergence of the logits, in nats; None: by dtype.
        max_new_tokens: Maximum length of an answer.
    """

    model_dir: Path
    like: ModelFiles | None = None
    format_name: str | None = None
    suite: Suite | None = None
    max_kl: float | None = None
    max_new_tokens: int = 256
    _engine: LocalEngine | None = field(default=None, init=False)

    def run(self) -> Iterator[Check]:
        """Yield every check as it finishes; checks that depend on a failed one are skipped."""
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
        passed: set[str] = set()
        for name, check, needs in steps:
            if missing := [need for need in needs.split() if need not in passed]:
                yield Check(name, "skipped", f"needs {' and '.join(missing)}")
                continue
            try:
                found = check()
            except (_CheckFailedError, ConfigError, DataError, CheckpointError) as error:
                yield Check(name, "failed", str(error))
                continue
            if found is not None:
                passed.add(name)
            yield Check(name, "skipped" if found is None else "ok", found or "not requested")

    def _check_files(self) -> str:
        needed = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
        missing = [name for name in needed if not (self.model_dir / name).is_file()]
        weights = sorted(file.name for file in self.model_dir.glob("*.safetensors"))
        if not weights:
            missing.append("*.safetensors")
        if missing:
            raise _CheckFailedError(f"missing: {', '.join(missing)}")
        for name in needed:
            _read_json(self.model_dir / name)
        return f"{len(needed)} files and {format_count(len(weights), 'weight file')}"

    def _check_weights(self) -> str:
        """Compare the tensors in the files with their index, and with the names and shapes of the config's model."""
        shapes = self._read_shapes()
        expected, tied = _expected_shapes(self.model_dir)
        wrong = [
            f"{name} has the shape {list(shapes[name])}, by the config {list(shape)}"
            for name, shape in expected.items()
            if name in shapes and shapes[name] != shape
        ]
        wrong += [
            f"{name} is missing"
            for name in expected
            if name not in shapes and not tied.get(name, set()) & shapes.keys()
        ]
        wrong += [f"{name} is not part of a model of this config" for name in shapes if name not in expected]
        _raise_if_any(wrong)
        count = sum(math.prod(shape) for shape in shapes.values())
        return f"{format_count(len(shapes), 'tensor')}, {count:,} values, with the shapes of the config"

    def _read_shapes(self) -> dict[str, tuple[int, ...]]:
        files = {file.name: file for file in self.model_dir.glob("*.safetensors")}
        shapes: dict[str, tuple[int, ...]] = {}
        files_by_key: dict[str, str] = {}
        wrong: list[str] = []
        for name, file in sorted(files.items()):
            try:
                with safe_open(str(file), framework="pt") as opened:
                    keys = opened.keys()
                    for key in keys:
                        wrong += [f"{key} is in both {files_by_key[key]} and {name}"] if key in files_by_key else []
                        files_by_key[key] = name
                        shapes[key] = tuple(opened.get_slice(key).get_shape())
            except (SafetensorError, OSError) as error:
                wrong.append(f"{name} cannot be read ({error})")
        if (self.model_dir / _INDEX).is_file():
            weight_map = _read_json(self.model_dir / _INDEX).get("weight_map")
            if not isinstance(weight_map, dict):
                raise _CheckFailedError(f"{_INDEX} has no weight_map")
            wrong += [
                f"{name} is named by the index and missing" for name in sorted(set(weight_map.values()) - files.keys())
            ]
            wrong += [f"{name} is not in the index" for name in sorted(files.keys() - set(weight_map.values()))]
            wrong += [
                f"{key} is {'in ' + files_by_key[key] if key in files_by_key else 'missing'}, by the index in {name}"
                for key, name in weight_map.items()
                if name in files and files_by_key.get(key) != name
            ]
            wrong += [
                f"{key} in {file} is not in the index" for key, file in files_by_key.items() if key not in weight_map
            ]
        elif list(files) != ["model.safetensors"]:
            wrong.append(f"{format_count(len(files), 'weight file')} and no {_INDEX}")
        _raise_if_any(wrong)
        return shapes

    def _check_values(self) -> str:
        """Find NaN and infinite weights, and matrices of zeros, which were never written."""
        wrong, count, dtypes = [], 0, set()
        for name, tensor in self._tensors():
            count += 1
            dtypes.add(str(tensor.dtype).removeprefix("torch."))
            if tensor.is_floating_point():
                # One pass: the sum is finite only if all values are, unless huge ones overflow it.
                if not tensor.double().sum().isfinite() and (bad := int((~tensor.isfinite()).sum())):
                    wrong.append(f"{name} has {bad:,} non-finite values")
                elif tensor.ndim > 1 and not tensor.any():
                    wrong.append(f"{name} is all zeros")
        _raise_if_any(wrong)
        return f"{format_count(count, 'tensor')} finite, {' and '.join(sorted(dtypes))}"

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for file in sorted(self.model_dir.glob("*.safetensors")):
            with safe_open(str(file), framework="pt") as opened:
                keys = opened.keys()
                for key in keys:
                    yield key, opened.get_tensor(key)

    def _check_template(self) -> str:
        template = ChatTemplate(self.model_dir)
        found = find_call_format(template) if self.format_name is None else self._named_format(template)
        vocab = _read_json(self.model_dir / "config.json").get("vocab_size")
        if isinstance(vocab, int) and len(template.tokenizer) > vocab:
            raise _CheckFailedError(f"the tokenizer has {len(template.tokenizer):,} tokens, the model {vocab:,}")
        if self.like is not None:
            origin = ChatTemplate(self.like.tokenizer_dir)
            if origin.source != template.source:
                raise _CheckFailedError(f"the chat template differs from that of {self.like.tokenizer_dir}")
            if origin.tokenizer.get_vocab() != template.tokenizer.get_vocab():
                raise _CheckFailedError(f"the tokenizer's vocabulary differs from that of {self.like.tokenizer_dir}")
        declared = getattr(template.tokenizer, RESPONSE_KEY, None)
        for answer in () if declared is None else iter_seeded_answers(template):
            if (read := read_answer(template.tokenizer, answer)).kind == "misread":
                raise _CheckFailedError(f"its response_template misreads answers of its chat template: {read.detail}")
        same = "" if self.like is None else f", like {self.like.tokenizer_dir}"
        return f"renders tools, calls and results; writes calls as {found.name}{same}"

    def _named_format(self, template: ChatTemplate) -> CallFormat:
        named, found = get_format(self.format_name or ""), find_call_format(template)
        if named.name != found.name:
            raise _CheckFailedError(f"the chat template writes calls as {found.name}, not as {named.name}")
        return named

    def _check_stops(self) -> str:
        """Compare the stop tokens of the generation config, which servers use, with the template's end of turn."""
        stops = _read_json(self.model_dir / "generation_config.json").get("eos_token_id")
        known = set(stops if isinstance(stops, list) else [stops])
        template = ChatTemplate(self.model_dir)
        names = {i: template.tokenizer.convert_ids_to_tokens(i) for i in template.stop_ids}
        if missing := [f"{name} ({i})" for i, name in sorted(names.items()) if i not in known]:
            raise _CheckFailedError(
                f"the template ends a turn with {' and '.join(missing)}, which generation_config.json's eos_token_id "
                f"({stops}) lacks: a server would not stop there"
            )
        return f"at {' and '.join(names[i] for i in sorted(names))}, also in the generation config"

    def _check_loads(self) -> str:
        self._engine = LocalEngine(self.model_dir)
        return f"{type(self._engine.model).__name__} in transformers, on {self._engine.device}"

    def _check_logits(self) -> str | None:
        """Compare next-token distributions with those of the original model."""
        if self.like is None:
            return None
        assert self._engine is not None
        other = LocalEngine(*self.like)
        prompts = _probe_prompts(self.suite)
        encoded = [self._engine.template.encode_prompt(prompt) for prompt in prompts]
        kl, agreed, count, gap = 0.0, 0, 0, 0.0
        for ids in encoded:
            ours, theirs = (_log_probabilities(engine, ids) for engine in (self._engine, other))
            kl += float((theirs.exp() * (theirs - ours)).sum())
            agreed += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
            gap = max(gap, float((ours - theirs).abs().max()))
            count += len(ids)
        # As stored, since the models may compute in another one; of the original, the adapter is merged in that, too.
        dtypes = [engine.model.config.dtype for engine in (self._engine, other)]
        limit = self.max_kl if self.max_kl is not None else max(_MAX_KL.get(dtype, 5e-3) for dtype in dtypes)
        found = f"mean KL {kl / count:.2e} nats over {count:,} positions, same top token at {agreed / count:.1%}"
        # Also false for NaN.
        if not kl / count <= limit:
            named = " + ".join(map(str, filter(None, self.like)))
            raise _CheckFailedError(f"{found}: over {limit:g}, so this is not the model {named}")
        return f"{found}, largest gap {gap:.2e}"

    def _check_calls(self) -> str | None:
        """Require a well-formed call of an offered tool in at least one case in which a call is due."""
        if self.suite is None:
            return None
        assert self._engine is not None
        cases = [case for case in self.suite.cases if case.expected]
        reader = find_call_format(self._engine.template) if self.format_name is None else get_format(self.format_name)
        called = correct = 0
        for judged in ask_cases(cases, self._engine, reader, self.max_new_tokens):
            parsed = judged.reading.strict
            offered = {tool.name for tool in judged.episode.state.tools}
            called += bool(parsed.calls) and not parsed.malformed and all(call.name in offered for call in parsed.calls)
            correct += judged.strict.is_valid
        found = (
            f"{called} of {len(cases)} cases of {self.suite.name} get a well-formed call of an offered tool, "
            f"{correct} the correct one"
        )
        if not called:
            raise _CheckFailedError(found)
        return found


def _probe_prompts(suite: Suite | None) -> list[Conversation]:
    from fctune.data.synthetic import iter_conversations

    if suite is not None:
        return [case.prompt for case in suite.cases[:_NUM_PROBES]]
    return list(iter_conversations("train", _NUM_PROBES, seed=0))


@torch.no_grad()
def _log_probabilities(engine: LocalEngine, ids: list[int]) -> Tensor:
    logits: Tensor = engine.model(input_ids=torch.tensor([ids], device=engine.device)).logits[0]
    return logits.double().log_softmax(-1).cpu()


def _expected_shapes(model_dir: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, set[str]]]:
    """Return the shapes by name of a model of this config, and for each name the others of a tied weight."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(str(model_dir), local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # a broken config can make the library raise anything
        reason = one_line(error, 200)
        raise _CheckFailedError(f"config.json does not define a model ({type(error).__name__}: {reason})") from None
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    names: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    return shapes, {name: group - {name} for group in names.values() for name in group}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _CheckFailedError(f"{path.name} cannot be read ({error})") from None
    if not isinstance(value, dict):
        raise _CheckFailedError(f"{path.name}: expected an object")
    return value


def _raise_if_any(wrong: Sequence[str]) -> None:
    if wrong:
        rest = f"; and {len(wrong) - _NUM_SHOWN:,} more" if len(wrong) > _NUM_SHOWN else ""
        raise _CheckFailedError("; ".join(wrong[:_NUM_SHOWN]) + rest)
