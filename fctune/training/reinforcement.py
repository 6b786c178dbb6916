"""Learning from a policy's own answers: tasks, engine, and publishing of the policy to the engine."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fctune.base import distributed
from fctune.base.distributed import World
from fctune.base.errors import ConfigError
from fctune.checkpoint.resume import Resume
from fctune.config.intervals import format_count
from fctune.config.schema import RunConfig
from fctune.config.sections.distill import DistillConfig
from fctune.config.sections.grpo import GRPOConfig
from fctune.config.sections.rollouts import AGENT, is_dialogue_source
from fctune.data.chat_template import ChatTemplate
from fctune.data.stop_tokens import read_eos_ids
from fctune.engines.engine import PolicyEngine, Sampling
from fctune.engines.local import LocalEngine
from fctune.engines.policy_server import PolicyServer, PolicyServers
from fctune.models.architecture import ALL_LINEAR
from fctune.models.causal_lm import CausalLM
from fctune.models.export import export_adapter
from fctune.models.lora import iter_adapted
from fctune.runs.directory import RunFiles
from fctune.runs.record import MetricsFile
from fctune.tasks.episode import EpisodeLimits
from fctune.tasks.evaluation.live import build_answering, random_state_restored
from fctune.tasks.opinions import TextJudge
from fctune.tasks.rollouts import CaseTasks, RolloutSettings, TaskSet
from fctune.tasks.sampling.collection import TaskOrder
from fctune.tasks.sampling.task_sets import load_training_suite, open_dialogue_tasks, open_server_engine
from fctune.tasks.suite_files import benchmark_of
from fctune.training.adapters import AdapterTuning
from fctune.training.planned_run import PlannedRun, TrainingData
from fctune.training.policy_gradient import PolicyObjective
from fctune.training.rollout_source import RolloutSource
from fctune.training.setup import check_memory_to_answer

logger = logging.getLogger("fctune")


class PolicyTasks(TrainingData):
    """Tasks that the policy in training answers; its answers are what the steps train on.

    Args:
        config: Config of the run, with a section of rollouts.
        template: Template of the prompts.
        rank: This process; 0 checks the tasks.
    """

    loader = None

    def __init__(self, config: RunConfig, template: ChatTemplate, rank: int):
        assert config.rollouts is not None
        self._section, self._template = config.rollouts, template
        self.tasks, self.order, self._benchmark = _open_tasks(config.rollouts, config, template, rank)

    def describe(self) -> dict[str, Any]:
        """Return the cases, in the form in which run.json records a prepared set."""
        num_cases = len(self.tasks.ids)
        inputs = {"cases": self._section.cases, "num_cases": num_cases, "validation_share": 0.0}
        described = {"path": ".", "fingerprint": self.tasks.digest(), "inputs": inputs}
        return described | ({"benchmark_rows": num_cases} if self._benchmark else {})

    def count_steps(self, config: RunConfig, world: World) -> int:
        """Return the number of optimizer steps: those of ``epochs`` passes over the cases if no group is dropped."""
        batches = config.epochs * math.ceil(len(self.tasks.ids) / self._section.prompts_per_step)
        steps = batches * self._section.updates_per_batch
        return steps if config.max_steps is None else min(steps, config.max_steps)

    def check_resume(self, resume: Resume) -> None:
        """Do nothing: the source of the steps compares the cases when it is restored."""

    def open_source(self, planned: PlannedRun, stop_if_requested: Callable[[], None]) -> RolloutSource:
        """Return the source of steps on rollouts."""
        is_shared, name = self._section.server is not None, self._section.section
        if self.tasks.is_exclusive and not is_shared and planned.world.world_size > 1:
            raise ConfigError(
                f"{name}.cases={self._section.cases}: a tool resets this server's state, which "
                f"{planned.world.world_size} processes would share. Set {name}.engine=server, so that one process "
                "asks, or concurrency in the file to 2 or more if each session has a state of its own."
            )
        engine: PolicyEngine | None
        set_awake: Callable[[bool], None] | None = None
        if is_shared:
            engine, publish, set_awake = self._open_server(planned, stop_if_requested)
        else:
            engine, publish = self._open_in_process(planned)
        return RolloutSource(
            *(planned.config, self.tasks, self.order, engine, planned.world, planned.model.make_bounds, publish),
            log=planned.run.directory.rollouts,
            num_steps=planned.num_steps,
            is_shared=is_shared,
            set_awake=set_awake,
            meanwhile=stop_if_requested,
            cost=planned.model.row_cost,
        )

    def _open_server(
        self, planned: PlannedRun, stop_if_requested: Callable[[], None]
    ) -> tuple[PolicyEngine | None, Callable[[int], None], Callable[[bool], None] | None]:
        """Return rank 0's engine, and functions that load the adapter in training and put the servers to sleep."""
        server, directory = self._section.server, planned.run.directory.path
        opened: list[PolicyServer | PolicyServers] = []
        adapter, base = planned.config.adapter, planned.config.model.path
        assert server is not None
        assert adapter is not None

        def connect() -> None:
            engine = open_server_engine(
                *(server, self._template, directory),
                temperature=self._section.temperature,
                min_positions=planned.config.data.row_tokens,
                is_resumed=planned.run.resume is not None,
                log=logger.warning,
                section=self._section.section,
            )
            opened.append(engine)

        distributed.run_long_on_rank_0(connect)

        def publish(version: int) -> None:
            exported = directory / "policy"
            arguments = (planned.model, adapter, base, planned.model_dir, exported, planned.world.is_main)
            distributed.run_on_all_ranks(lambda: export_adapter(*arguments, prompting=planned.prompting))
            distributed.run_long_on_rank_0(lambda: opened[0].publish(exported, version), stop_if_requested)

        def set_awake(is_awake: bool) -> None:
            if is_awake:
                distributed.run_on_all_ranks(torch.cuda.empty_cache)  # no rank may hold memory that a server needs
                distributed.run_long_on_rank_0(lambda: opened[0].wake(), stop_if_requested)
            else:
                distributed.run_long_on_rank_0(lambda: opened[0].sleep())

        return (opened[0] if opened else None), publish, set_awake if self._section.shares_gpus else None

    def _open_in_process(self, planned: PlannedRun) -> tuple[LocalEngine, Callable[[int], None]]:
        """Return this rank's engine, and the function that passes it the merged weights of the model in training."""
        from transformers import GenerationConfig

        model, model_dir, device = planned.model, planned.model_dir, planned.world.device
        key = f"{self._section.section}.engine"
        check_memory_to_answer(model, planned.world, f"{key}=in_process", f"Let a server generate: {key}=server")
        engine = LocalEngine(
            model_dir,
            batch_size=self._section.generation_batch_size,
            sampling=Sampling(self._section.temperature, planned.config.seed),
            device=device,
            loads_model=False,
            template_args=planned.config.model.template_args,
            chat_template=planned.chat_template,
            keeps_tokens=True,
            reuses_prefixes=False,  # the memory is that of the training state
        )
        # Of the base, apart from those of the template.
        eos_ids = sorted(read_eos_ids(model_dir, has_fallback=True))

        def publish(version: int) -> None:
            with random_state_restored(device):
                policy = build_answering(model, model_dir, device)
                # Penalties in the model's own generation config would change the policy that answers.
                policy.generation_config = GenerationConfig(eos_token_id=eos_ids or None)
                engine.publish(policy, version)

        return engine, publish


def _open_tasks(
    section: GRPOConfig | DistillConfig, config: RunConfig, template: ChatTemplate, rank: int
) -> tuple[TaskSet, TaskOrder, str | None]:
    """Return the tasks, their order, and the benchmark that they belong to, if any."""
    limits = EpisodeLimits(section.max_new_tokens, max_tokens=config.data.row_tokens)
    settings = RolloutSettings(template, limits, section.reward, section.section)
    if is_dialogue_source(section.cases):
        files = RunFiles(config.output_dir)
        folder = files.agent_answers if section.cases.startswith(AGENT) else files.mcp_calls
        record = folder / f"rank{rank:05d}.jsonl"
        log = logger.warning if rank == 0 else lambda line: None
        dialogues = open_dialogue_tasks(section.cases, section.dialogue, settings, record=record, log=log)
        try:
            if rank == 0:
                dialogues.check()
        except BaseException:
            dialogues.close()
            raise
        return dialogues, TaskOrder(dialogues.ids, config.seed), None
    suite = load_training_suite(section.cases, section.force_benchmark, section.section)
    if isinstance(section, GRPOConfig) and section.judge is not None:
        folder = RunFiles(config.output_dir).judge if section.judge.cache is None else Path(section.judge.cache)
        settings = replace(settings, judge=TextJudge(section.judge, folder, rank))
    tasks = CaseTasks(suite, settings)
    order = TaskOrder(tasks.ids, config.seed, tasks.categories, section.category_shares, section.section)
    return tasks, order, benchmark_of(suite)


def check_served_adapters(model: CausalLM, config: RunConfig) -> None:
    """Check that a server that generates a run's answers can serve the adapters of its model.

    Raises:
        ConfigError: They are on experts or routers, and the server would ignore them.
    """
    architecture, section = model.architecture, config.rollouts
    if not architecture.expert_names or section is None or section.engine != "server":
        return
    name = section.section
    linears = [one for one in architecture.resolve_adapter_modules(ALL_LINEAR) if one in architecture.linear_names]
    if adapted := sorted({one.rpartition(".")[2] for one, _ in iter_adapted(model)}):
        raise ConfigError(
            f"{name}.engine=server: this model is a mixture of experts, and vLLM serves no adapters on experts and "
            f"routers ({', '.join(adapted)}), so the answers would not be those of the policy in training. Set "
            f"adapter.modules=[{', '.join(linears)}], which leaves the experts as they are, or "
            f"{name}.engine=in_process, which answers with the merged weights."
        )
    logger.info("%s: the policy learns by its linears alone; the server answers with the experts of the base", name)


class PolicyTuning(AdapterTuning):
    """A run that trains adapters on its own rewarded answers."""

    def objective(self) -> PolicyObjective:
        """Return the policy loss."""
        assert self.requested_config.grpo is not None
        return PolicyObjective(self.requested_config.grpo)

    def select_trainable_(self, model: CausalLM) -> None:
        """Freeze the base and add an adapter to each selected linear; a server's policy has none on experts.

        Raises:
            ConfigError: A server generates, and adapters on experts or routers are selected, which it would ignore.
        """
        super().select_trainable_(model)
        check_served_adapters(model, self.requested_config)

    def open_data(self) -> tuple[RunConfig, PolicyTasks]:
        """Return the config as it is, and the tasks of the ``grpo`` section."""
        config = self.requested_config

        def open_tasks() -> PolicyTasks:
            switches = config.model.template_args
            template = ChatTemplate(self.model_dir, template_args=switches, chat_template=self.chat_template)
            return PolicyTasks(config, template, self.world.rank)

        return config, distributed.run_on_all_ranks(open_tasks)

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
