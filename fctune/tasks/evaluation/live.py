"""Tool-call accuracy of a model while it is being trained.

The merged weights are gathered, one tensor at a time, into a second model that answers; each rank answers its share of
the cases. The model in training is only read: its mode, caches, shards and the random generators stay as they are. The
accuracy is that of the export, which has the same weights in the same code. Needs memory for the complete model on
every rank meanwhile.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fctune.base import distributed
from fctune.base.distributed import World
from fctune.base.errors import ConfigError
from fctune.calls.response_template import find_call_format
from fctune.config.sections.evaluation import EvalConfig
from fctune.data.chosen_template import ChosenTemplate
from fctune.engines.local import LocalEngine
from fctune.models.causal_lm import CausalLM
from fctune.models.export import iter_merged
from fctune.models.lora import count_parameters, is_adapter
from fctune.tasks.evaluation.run import ask_cases
from fctune.tasks.evaluation.summary import tally_judgements
from fctune.tasks.suite import Suite
from fctune.tasks.suite_files import read_cases
from fctune.tasks.task import Case

# Rates that are logged in addition to the accuracy.
RATES = ("tool_selection", "tool_f1", "argument_f1", "schema_valid", "false_call", "missed_call")


class LiveEvaluation:
    """Measures a model in training on held-out cases. Every rank calls every method at the same step.

    Args:
        config: The cases and how much time they may take.
        model_dir: The base model's directory, for its config, tokenizer and chat template.
        world: This process among all ranks.
        template_args: Switches of the chat template, ``model.template_args``.
        chat_template: Template in place of the model's own, if any.
        cases: Cases to ask; None reads those of the config's file.

    Raises:
        DataError: The cases cannot be read.
    """

    def __init__(
        self,
        config: EvalConfig,
        model_dir: Path,
        world: World,
        template_args: dict[str, Any] | None = None,
        chat_template: ChosenTemplate | None = None,
        cases: Sequence[Case] | None = None,
    ):
        self.config = config
        self.world = world
        self.model_dir = model_dir
        self.template_args = template_args
        self.chat_template = chat_template
        if cases is None:
            cases = distributed.run_on_all_ranks(lambda: read_cases(config.cases))[: config.max_cases]
        self.suite = Suite("held-out", tuple(cases))
        self.spent_s = 0.0
        self._last_s = 0.0
        self._started = time.perf_counter()

    def is_within_budget(self) -> bool:
        """Return True, on all ranks, if another evaluation like the last one stays within the share of time.

        True if there was none yet.
        """
        trained_s = time.perf_counter() - self._started - self.spent_s
        evaluated_s = self.spent_s + self._last_s
        mine = evaluated_s <= self.config.max_share_of_time * (trained_s + evaluated_s)
        return distributed.run_on_rank_0(lambda: mine or not self.spent_s)

    @torch.no_grad()
    def measure(self, model: CausalLM) -> dict[str, Any]:
        """Evaluate the model and return the accuracy and its parts, ``eval_*``, equal on all ranks.

        Raises:
            ConfigError: The call format of the model's chat template is unknown.
        """
        started = time.perf_counter()
        with random_state_restored(self.world.device):
            engine = self._engine(model)
            call_format = find_call_format(engine.template)
            share = self.suite.cases[self.world.rank :: self.world.world_size]
            judged = [
                (one.case.category, one.strict, one.lenient)
                for one in ask_cases(share, engine, call_format, self.config.max_new_tokens)
            ]
            del engine
        gathered = [one for of_rank in distributed.all_gather_objects(judged) for one in of_rank]
        self._last_s = time.perf_counter() - started
        self.spent_s += self._last_s
        summary = tally_judgements(self.suite, gathered).summarise()
        return _to_metrics(summary["scores"]) | {"eval_time_s": self._last_s}

    def _engine(self, model: CausalLM) -> LocalEngine:
        from transformers import GenerationConfig

        device = self.world.device
        answering = build_answering(model, self.model_dir, device)
        if (self.model_dir / "generation_config.json").is_file():
            answering.generation_config = GenerationConfig.from_pretrained(str(self.model_dir), local_files_only=True)
        return LocalEngine(
            self.model_dir,
            batch_size=self.config.batch_size,
            device=device,
            model=answering,
            template_args=self.template_args,
            chat_template=self.chat_template,
        )


@torch.no_grad()
def build_answering(model: CausalLM, model_dir: Path, device: torch.device) -> Any:
    """Build transformers' text model with the merged weights of a model in training. Every rank calls it.

    Args:
        model: The model in training; not changed.
        model_dir: The base model's directory, for its config.
        device: Where to put the weights.
    """
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(str(model_dir), local_files_only=True).get_text_config()
    config.tie_word_embeddings = model.architecture.is_tied
    with init_empty_weights(include_buffers=False):
        answering = AutoModelForCausalLM.from_config(config, dtype=model.precision.compute_dtype)
    weights = {name: tensor.to(device) for name, tensor in iter_merged(model)}
    answering.load_state_dict(weights, strict=False, assign=True)
    answering.tie_weights()
    missing = [name for name, parameter in answering.named_parameters() if parameter.is_meta]
    assert not missing, f"weights missing from the model in training: {missing[:3]}"
    return answering.eval()


def check_answering_memory(model: CausalLM, used_bytes: int, memory_bytes: int, key: str, remedy: str) -> None:
    """Check that the complete model fits on each device next to the training state.

    Args:
        model: Model in training, possibly sharded.
        used_bytes: Memory of the device that is in use.
        memory_bytes: Memory of the device.
        key: Config key that requests answers, for the message.
        remedy: What to do if it does not fit, for the message.

    Raises:
        ConfigError: It does not fit.
    """
    numel = sum(size for name, size in count_parameters(model).items() if not is_adapter(name))
    needed, gib = numel * model.precision.compute_dtype.itemsize, 2**30
    if used_bytes + needed > memory_bytes:
        raise ConfigError(
            f"{key}: answering needs the complete model on each device, {needed / gib:.1f} GiB, and "
            f"{(memory_bytes - used_bytes) / gib:.1f} of {memory_bytes / gib:.1f} GiB are free. "
            f"{remedy}."
        )


@contextmanager
def random_state_restored(device: torch.device) -> Iterator[None]:
    """Restore the state of every random generator of this rank; by default torch would start all CUDA devices."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
    random.setstate(python)
    np.random.set_state(numpy)


def _to_metrics(scores: dict[str, Any]) -> dict[str, Any]:
    rates = scores["all"]["rates"]
    accuracy = rates["accuracy"]
    metrics: dict[str, Any] = {
        "eval_accuracy": accuracy["rate"],
        "eval_accuracy_low": accuracy["low"],
        "eval_accuracy_high": accuracy["high"],
        "eval_num_cases": scores["all"]["n"],
    }
    for name in RATES:
        if (share := rates[name]["rate"]) is not None:
            metrics[f"eval_{name}"] = share
    categories = sorted(scores.keys() - {"all"})
    for category in categories if len(categories) > 1 else ():
        metrics[f"eval_accuracy/{category}"] = scores[category]["rates"]["accuracy"]["rate"]
    return metrics
