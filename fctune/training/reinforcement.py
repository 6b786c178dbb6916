"""Reinforcement learning from verdicts: tasks, engine, and publishing of the policy to the engine."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from dataclasses import replace

from fctune.base import distributed
from fctune.base.distributed import World
from fctune.config.intervals import format_count
from fctune.config.schema import RunConfig
from fctune.config.sections.rollouts import is_dialogue_source
from fctune.data.chat_template import ChatTemplate
from fctune.data.packed_samples import pack_samples
from fctune.data.prepared_set import PreparedSet
from fctune.data.stop_tokens import read_eos_ids
from fctune.engines.engine import Sampling
from fctune.engines.local import LocalEngine
from fctune.engines.policy_server import PolicyServer
from fctune.models.export import export_adapter
from fctune.runs.record import MetricsFile
from fctune.tasks.episode import EpisodeLimits
from fctune.tasks.evaluation.live import build_answering, random_state_restored
from fctune.tasks.rollouts import CaseTasks, RolloutSettings, TaskSet
from fctune.tasks.sampling.collection import TaskOrder
from fctune.tasks.sampling.task_sets import load_training_suite, open_dialogue_tasks, open_server_engine
from fctune.tasks.suite_files import benchmark_of
from fctune.training.adapters import AdapterTuning
from fctune.training.callbacks.stop import StopCallback
from fctune.training.entry import Run
from fctune.training.policy_gradient import PolicyObjective
from fctune.training.rollout_source import RolloutSource

logger = logging.getLogger("fctune")


class PolicyTuning(AdapterTuning):
    """A run that trains adapters on its own rewarded answers."""

    def __init__(self, config: RunConfig, world: World, run: Run):
        super().__init__(config, world, run)
        assert config.grpo is not None
        self.grpo = config.grpo

    def objective(self) -> PolicyObjective:
        """Return the policy loss."""
        return PolicyObjective(self.grpo)

    def prepare(self) -> PreparedSet:
        """Read the cases, and return an empty prepared set that represents them in the run's record."""
        self.tasks, self.order, benchmark = distributed.run_on_all_ranks(self._open_tasks)
        num_cases = len(self.tasks.ids)
        inputs = {"cases": self.grpo.cases, "num_cases": num_cases, "validation_share": 0.0}
        data = self.config.data
        empty = pack_samples([], [], data.seq_len, data.packed, self.tasks.digest(), inputs)
        return replace(empty, counts=replace(empty.counts, benchmark=num_cases if benchmark else 0))

    def count_steps(self) -> int:
        """Return the number of optimizer steps: those of ``epochs`` passes over the cases if no group is dropped."""
        batches = self.config.epochs * math.ceil(len(self.tasks.ids) / self.grpo.prompts_per_step)
        steps = batches * self.grpo.updates_per_batch
        return steps if self.config.max_steps is None else min(steps, self.config.max_steps)

    def open_source(self) -> RolloutSource:
        """Return the source of steps on rollouts."""
        is_shared = self.grpo.server is not None
        engine, publish = self._open_server() if is_shared else self._open_in_process()
        return RolloutSource(
            *(self.config, self.tasks, self.order, engine, self.world, self.model.make_bounds, publish),
            log=self.run.directory.rollouts,
            num_steps=self.num_steps,
            is_shared=is_shared,
            meanwhile=self._stop_if_requested,
        )

    def describe_nothing_learned(self, steps: MetricsFile) -> str | None:
        """Return why no step has changed the policy; None if one did, or if the file lacks the run's first steps."""
        steps.update()
        losses, norms = steps.column("loss"), steps.column("grad_norm")  # of steps that were not finite, one is None
        taken = [norm for loss, norm in zip(losses, norms, strict=True) if loss is not None and norm is not None]
        if any(taken) or not steps.steps or steps.steps[0] != 1:
            return None
        return (
            f"nothing was learned in {format_count(len(norms), 'step')}: the gradient was 0 in {len(taken):,}, as when "
            f"all answers of each group have equal rewards, and not finite in {len(norms) - len(taken):,}, which were "
            "skipped. Set grpo.drop_flat_groups=true and on_nonfinite=stop to see the cause in the first such step, "
            "and use cases that the model sometimes gets right."
        )

    def _stop_if_requested(self) -> None:
        """Save and stop as after a step, while the run waits for a server that may be gone.

        Raises:
            Stopped: A stop was requested.
        """
        for callback in self.callbacks:
            if isinstance(callback, StopCallback):
                callback.on_step_end(self.step, is_last=False)

    @functools.cached_property
    def _template(self) -> ChatTemplate:
        switches = self.config.model.template_args
        return ChatTemplate(self.model_dir, template_args=switches, chat_template=self.chat_template)

    @functools.cached_property
    def _eos_ids(self) -> list[int]:
        """Tokens that end an answer of the base, apart from those of the template."""
        return sorted(read_eos_ids(self.model_dir, has_fallback=True))

    def _open_tasks(self) -> tuple[TaskSet, TaskOrder, str | None]:
        """Return the tasks, their order, and the benchmark that they belong to, if any."""
        grpo = self.grpo
        limits = EpisodeLimits(grpo.max_new_tokens, max_tokens=self.config.data.seq_len)
        settings = RolloutSettings(self._template, limits, grpo.reward)
        if is_dialogue_source(grpo.cases):
            dialogues = open_dialogue_tasks(grpo.cases, grpo.dialogue, settings)
            return dialogues, TaskOrder(dialogues.ids, self.config.seed), None
        suite = load_training_suite(grpo.cases, grpo.force_benchmark)
        tasks = CaseTasks(suite, settings)
        order = TaskOrder(tasks.ids, self.config.seed, tasks.categories, grpo.category_shares)
        return tasks, order, benchmark_of(suite)

    def _open_server(self) -> tuple[PolicyServer | None, Callable[[int], None]]:
        """Return rank 0's engine, and the function that loads the adapter in training into the server."""
        server, directory, opened = self.grpo.server, self.run.directory.path, list[PolicyServer]()
        assert server is not None

        def connect() -> None:
            engine = open_server_engine(
                *(server, self._template, directory),
                temperature=self.grpo.temperature,
                min_positions=self.config.data.seq_len,
                is_resumed=self.run.resume is not None,
                log=logger.warning,
            )
            opened.append(engine)

        distributed.run_long_on_rank_0(connect)

        def publish(version: int) -> None:
            exported, base = directory / "policy", self.config.model.path
            arguments = (self.model, self.adapter, base, self.model_dir, exported, self.world.is_main)
            distributed.run_on_all_ranks(lambda: export_adapter(*arguments, prompting=self.prompting()))
            distributed.run_long_on_rank_0(lambda: opened[0].publish(exported, version), self._stop_if_requested)

        return (opened[0] if opened else None), publish

    def _open_in_process(self) -> tuple[LocalEngine, Callable[[int], None]]:
        """Return this rank's engine, and the function that passes it the merged weights of the model in training."""
        from transformers import GenerationConfig

        self.check_answering_memory("grpo.engine=in_process", "Let a server generate: grpo.engine=server")
        device = self.world.device
        engine = LocalEngine(
            self.model_dir,
            batch_size=self.grpo.generation_batch_size,
            sampling=Sampling(self.grpo.temperature, self.config.seed),
            device=device,
            loads_model=False,
            template_args=self.config.model.template_args,
            chat_template=self.chat_template,
            keeps_tokens=True,
        )

        def publish(version: int) -> None:
            with random_state_restored(device):
                policy = build_answering(self.model, self.model_dir, device)
                # Penalties in the model's own generation config would change the policy that answers.
                policy.generation_config = GenerationConfig(eos_token_id=self._eos_ids or None)
                engine.publish(policy, version)

        return engine, publish
