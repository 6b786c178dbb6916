"""Tool-call accuracy of a model that is being trained.

The merged weights are gathered, one tensor at a time, into a second model that answers; each rank answers its share.
The model in training is read and not used: its mode, caches, shards and the random generators stay as they are, and
what is measured is what the export would score, since both are the same weights in the same code. It asks for memory
for the whole model on every rank while it lasts.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fctune import distributed
from fctune.calls.cases import read_cases
from fctune.calls.formats.registry import detect_format
from fctune.calls.metrics import Outcome, score
from fctune.config.schema import EvalConfig
from fctune.distributed import World
from fctune.evaluation.judging import judge_answer, judge_row
from fctune.evaluation.suites import Suite
from fctune.generation.in_process import InProcessEngine
from fctune.models.causal_lm import CausalLM
from fctune.models.export import iter_merged

# Rates that are written beside the accuracy.
_RATES = ("tool_selection", "tool_f1", "argument_f1", "schema_valid", "false_call", "missed_call")


class LiveEvaluation:
    """Measures a model in training on held-out cases. Every rank calls every method at the same step.

    Raises (at construction):
        ConfigError: no cases are named, or the model's template has no call format that is known.
        DataError: cases that cannot be read.
    """

    def __init__(self, config: EvalConfig, model_dir: Path, world: World):
        self.config = config
        self.world = world
        self.model_dir = model_dir
        cases = distributed.run_on_all_ranks(lambda: read_cases(str(config.cases)))[: config.max_cases]
        self.suite = Suite("held-out", tuple(cases))
        self.spent_s = 0.0
        self._last_s = 0.0
        self._started = time.perf_counter()

    def is_within_budget(self) -> bool:
        """Whether one more evaluation, as long as the last one, keeps to the share of time; the same on all ranks.

        The first is always made.
        """
        trained_s = time.perf_counter() - self._started - self.spent_s
        mine = self.spent_s + self._last_s <= self.config.max_share_of_time * (trained_s + self.spent_s)
        return distributed.run_on_rank_0(lambda: mine or not self.spent_s)

    @torch.no_grad()
    def measure(self, model: CausalLM) -> dict[str, Any]:
        """Accuracy and its parts, ``eval_*``, equal on all ranks."""
        started = time.perf_counter()
        with _same_randomness():
            engine = self._engine(model)
            call_format = detect_format(engine.template.source)
            share = self.suite.cases[self.world.rank :: self.world.world_size]
            outcomes: list[tuple[str, Outcome]] = []
            for answer in engine.answer([case.prompt for case in share], self.config.max_new_tokens) if share else ():
                case = share[answer.index]
                row = judge_answer(self.suite, case, answer, call_format)
                outcomes.append((case.category, judge_row(self.suite, case, row)[0]))
            del engine
        everyones = [one for of_rank in distributed.all_gather_objects(outcomes) for one in of_rank]
        self._last_s = time.perf_counter() - started
        self.spent_s += self._last_s
        return _describe(everyones) | {"eval_time_s": self._last_s}

    def _engine(self, model: CausalLM) -> InProcessEngine:
        from accelerate import init_empty_weights
        from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

        config = AutoConfig.from_pretrained(str(self.model_dir), local_files_only=True)
        with init_empty_weights(include_buffers=False):
            answering = AutoModelForCausalLM.from_config(config, dtype=model.precision.compute_dtype)
        device = self.world.device
        weights = {name: tensor.to(device) for name, tensor in iter_merged(model)}
        answering.load_state_dict(weights, strict=False, assign=True)
        answering.tie_weights()
        left = [name for name, parameter in answering.named_parameters() if parameter.is_meta]
        assert not left, f"weights that training does not have: {left[:3]}"
        if (self.model_dir / "generation_config.json").is_file():
            answering.generation_config = GenerationConfig.from_pretrained(str(self.model_dir), local_files_only=True)
        return InProcessEngine(self.model_dir, batch_size=self.config.batch_size, device=device, model=answering.eval())


@contextmanager
def _same_randomness() -> Iterator[None]:
    """Leave every random generator as it was found."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        yield
    random.setstate(python)
    np.random.set_state(numpy)


def _describe(outcomes: list[tuple[str, Outcome]]) -> dict[str, Any]:
    by_category: dict[str, list[Outcome]] = {}
    for category, outcome in outcomes:
        by_category.setdefault(category, []).append(outcome)
    everything = score({"all": [outcome for _, outcome in outcomes]})["all"]
    accuracy = everything["rates"]["accuracy"]
    found: dict[str, Any] = {
        "eval_accuracy": accuracy["rate"],
        "eval_accuracy_low": accuracy["low"],
        "eval_accuracy_high": accuracy["high"],
        "eval_num_cases": len(outcomes),
    }
    for name in _RATES:
        if (rate := everything["rates"][name]["rate"]) is not None:
            found[f"eval_{name}"] = rate
    for category, rates in sorted(score(by_category).items()):
        if len(by_category) > 1:
            found[f"eval_accuracy/{category}"] = rates["rates"]["accuracy"]["rate"]
    return found
