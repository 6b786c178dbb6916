"""Distillation: the divergence of a model from a teacher, on the model's own answers and on rows (GKD).

R. Agarwal et al., On-Policy Distillation of Language Models, ICLR 2024 (arXiv:2306.13649). The teacher is a server,
which sends its most likely tokens, or a copy of its weights on each rank, which gives the full distributions.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fctune.base import distributed
from fctune.base.distributed import World
from fctune.base.errors import ConfigError, DataError
from fctune.checkpoint.resume import Resume
from fctune.config.loading import read_environment
from fctune.config.schema import RunConfig
from fctune.config.sections.distill import DistillConfig
from fctune.data.chat_template import ChatTemplate, load_tokenizer
from fctune.data.loader import StepTotals, shuffled
from fctune.data.prepared_set import PreparedSet
from fctune.engines.policy_server import list_probes
from fctune.engines.server import require_equal_ids
from fctune.engines.teacher_server import OTHER_TOKENIZER, TeacherServer
from fctune.models.attention import AttentionKernel, choose_attention_kernel
from fctune.models.base_weights import check_base, load_base_
from fctune.models.causal_lm import CausalLM, materialize_
from fctune.models.hub import digest_model, resolve_model_dir
from fctune.models.loss import TEACHER_COPIES, Criterion
from fctune.models.precision import PrecisionPolicy, wide_dtype
from fctune.models.sources import build_model, read_architecture
from fctune.runs.device import compute_capability
from fctune.tasks.rollouts import Rollout
from fctune.training.objective import Objective
from fctune.training.planned_run import PlannedRun, TrainingData
from fctune.training.prefetch import Inputs, StepData
from fctune.training.recipe import FineTuning
from fctune.training.reinforcement import PolicyTasks, check_served_adapters
from fctune.training.rollout_source import RolloutSource
from fctune.training.rollout_steps import TrainedRollout, make_step_data
from fctune.training.setup import prepare_data

logger = logging.getLogger("fctune")

# Largest log of the probability of a teacher's top tokens together; the rest is the least probability of all others.
_MAX_LOG_MASS = -1e-7


def generalized_jsd(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Return the divergence of two distributions at each position, ``[n]``, in nats.

    The generalized Jensen-Shannon divergence D(beta) = beta KL(t || m) + (1 - beta) KL(s || m) with the mixture
    m = beta t + (1 - beta) s (arXiv:2306.13649, equation 1), and at its ends, as in TRL's
    ``GKDTrainer.generalized_jsd_loss``, not its value, which is 0, but KL(t || s) for beta = 0 and KL(s || t) for
    beta = 1.

    Args:
        student: Log-probabilities under the model in training, ``[n, v]``.
        teacher: Log-probabilities under the teacher, ``[n, v]``, finite.
        beta: From 0 to 1.
    """

    def divergence(p: Tensor, q: Tensor) -> Tensor:
        return (p.exp() * (p - q)).sum(1)

    if beta == 0:
        return divergence(teacher, student)
    if beta == 1:
        return divergence(student, teacher)
    mixture = torch.logaddexp(student + math.log1p(-beta), teacher + math.log(beta))
    return beta * divergence(teacher, mixture) + (1 - beta) * divergence(student, mixture)


class TopDivergence(Criterion):
    """Divergence from a teacher of which the most likely tokens are known.

    Both distributions are of these tokens and of one more event, any other token, as with TRL's ``loss_add_tail`` for
    teachers on servers. By the data-processing inequality this is at most the divergence over the vocabulary.

    Args:
        ids: The teacher's most likely tokens, int64 ``[n, k]`` with k below the size of the vocabulary.
        logprobs: Their log-probabilities, ``[n, k]``.
        beta: See ``generalized_jsd``.
    """

    num_copies = 4

    def __init__(self, ids: Tensor, logprobs: Tensor, beta: float):
        self.per_row = ids, logprobs
        self._beta = beta

    def losses(self, logits: Tensor, *per_row: Tensor) -> Tensor:
        """Return the divergences ``[m]``."""
        ids, logprobs = per_row
        logits = logits.to(wide_dtype(logits.dtype))
        # Not log(1 - sum), whose gradient is noise where the sum is nearly 1.
        tail = logits.scatter(1, ids, -math.inf).logsumexp(1, keepdim=True)
        student = torch.cat([logits.gather(1, ids), tail], 1) - logits.logsumexp(1, keepdim=True)
        return generalized_jsd(student, add_tail(logprobs.to(logits.dtype)), self._beta)


def add_tail(logprobs: Tensor) -> Tensor:
    """Return log-probabilities ``[n, k]`` with that of all other tokens, ``[n, k + 1]``; the latter is never 0."""
    mass = logprobs.logsumexp(1, keepdim=True).clamp(max=_MAX_LOG_MASS)
    return torch.cat([logprobs, torch.log(-torch.expm1(mass))], 1)


class FullDivergence(Criterion):
    """Divergence from a teacher in this process, over the full vocabulary.

    Models of one family may have different numbers of unused rows after the tokenizer's tokens; those that one of the
    models lacks are left out.

    Args:
        hidden: The teacher's final hidden states, ``[n, d]``.
        teacher: The teacher.
        beta: See ``generalized_jsd``.
    """

    num_copies = TEACHER_COPIES

    def __init__(self, hidden: Tensor, teacher: CausalLM, beta: float):
        self.per_row = (hidden,)
        self._teacher, self._beta = teacher, beta

    def losses(self, logits: Tensor, *per_row: Tensor) -> Tensor:
        """Return the divergences ``[m]``."""
        with torch.no_grad():
            known = self._teacher.project(per_row[0])
        size, dtype = min(logits.shape[1], known.shape[1]), wide_dtype(logits.dtype)
        student, teacher = (one[:, :size].log_softmax(1, dtype=dtype) for one in (logits, known))
        return generalized_jsd(student, teacher, self._beta)


class DistillObjective(Objective):
    """Mean divergence from the teacher over the answers' tokens.

    Args:
        config: The ``distill`` section of the run's config.
        teacher: Teacher in this process; None if the inputs have a server's log-probabilities.
    """

    metrics = ("teacher_tail",)

    def __init__(self, config: DistillConfig, teacher: CausalLM | None = None):
        self.config, self.teacher = config, teacher

    def compute(
        self, model: CausalLM, inputs: Inputs, totals: StepTotals, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Return the part of the mean, and of the probability that the teacher gives to tokens it does not name."""
        arguments = inputs.arguments(device)
        criterion: Criterion
        tail = torch.zeros(1, dtype=torch.float64, device=device)
        if self.teacher is not None:
            criterion = FullDivergence(compute_hidden(self.teacher, inputs, device), self.teacher, self.config.beta)
        else:
            ids, logprobs = inputs.teacher_ids, inputs.teacher_logprobs
            if ids is None or logprobs is None:  # a micro-batch of padding
                assert self.config.teacher_server is not None
                assert not len(inputs.supervised)
                ids = torch.zeros(0, self.config.teacher_server.top_k, dtype=torch.int64)
                logprobs = torch.zeros(ids.shape)
            ids, logprobs = ids.to(device, non_blocking=True), logprobs.to(device, non_blocking=True)
            criterion = TopDivergence(ids, logprobs, self.config.beta)
            tail += add_tail(logprobs.double())[:, -1].exp().sum() / totals.num_supervised
        losses = model(**arguments, is_summed=False, criterion=criterion)
        return losses.double().sum() / totals.num_supervised, tail


@torch.no_grad()
def compute_hidden(teacher: CausalLM, inputs: Inputs, device: torch.device) -> Tensor:
    """Return the teacher's final hidden states at the supervised positions of a batch, ``[n, d]``.

    Args:
        teacher: A model without adapters, in this process.
        inputs: Inputs of the model in training, on the CPU.
        device: Device of the teacher.
    """
    arguments = inputs.arguments(device)
    bounds = None if inputs.bounds is None else teacher.adopt_bounds(inputs.bounds).to(device)
    hidden = teacher.hidden_states(arguments["tokens"], arguments["positions"], bounds, arguments["row_lengths"])
    return hidden.flatten(0, 1).index_select(0, arguments["supervised"])


class LocalTeacher:
    """A teacher's weights in this process: checked first, and loaded once the student is.

    Args:
        path: Model directory, or ``hf:NAME@REVISION``.
        template: Chat template and tokenizer of the model in training.
        seq_len: Longest row, in tokens.

    Raises:
        ConfigError: It is no model, has another tokenizer, or too few positions.
        CheckpointError: Its weights are missing or damaged.
    """

    def __init__(self, path: str, template: ChatTemplate, seq_len: int):
        self._path, self._seq_len = path, seq_len
        self.model_dir = resolve_model_dir(path)
        key = f"distill.teacher={path}"
        try:
            self._architecture = read_architecture(self.model_dir)
            own = load_tokenizer(self.model_dir)
        except (ConfigError, DataError) as error:
            raise ConfigError(f"{key}: {error}") from None
        self._check_tokenizer(key, template, own)
        if seq_len > (positions := self._architecture.max_position_embeddings):
            raise ConfigError(
                f"{key}: has {positions:,} positions, and rows have data.seq_len={seq_len:,} tokens. Lower the latter, "
                "or choose another teacher."
            )
        check_base(self._build(PrecisionPolicy.uniform(torch.float32), "per_document"), self.model_dir)

    def digest(self) -> str:
        """Return a digest of its files."""
        return digest_model(self.model_dir)

    def load(self, student: CausalLM, world: World) -> CausalLM:
        """Return the teacher, frozen, in the student's compute dtype and on its device; every rank calls it.

        Each node reads its weights once.

        Raises:
            ConfigError: It does not fit into the GPU's memory next to the student.
            CheckpointError: Its weights are damaged.
        """
        model = distributed.run_on_all_ranks(lambda: self._allocate(student, world.device))
        distributed.run_on_all_ranks(lambda: load_base_(model, self.model_dir, world=world))
        return model.requires_grad_(False).eval()

    def _allocate(self, student: CausalLM, device: torch.device) -> CausalLM:
        dtype, head_dim = student.precision.compute_dtype, self._architecture.head_dim
        kernel, _ = choose_attention_kernel(device.type, dtype, head_dim, compute_capability(device))
        model = self._build(PrecisionPolicy.uniform(dtype), kernel)
        needed = sum(p.numel() * p.element_size() for p in model.parameters())
        if device.type == "cuda" and needed > (free := torch.cuda.mem_get_info(device)[0]):
            raise ConfigError(
                f"distill.teacher={self._path}: takes {needed / 2**30:.1f} GiB on each GPU, where "
                f"{free / 2**30:.1f} GiB are free. Serve the teacher, and set distill.teacher_server."
            )
        materialize_(model, device)
        return model

    def _build(self, precision: PrecisionPolicy, kernel: AttentionKernel) -> CausalLM:
        try:
            return build_model(self._architecture, self._seq_len, precision, kernel)
        except ConfigError as error:
            raise ConfigError(f"distill.teacher={self._path}: {error}") from None

    def _check_tokenizer(self, key: str, template: ChatTemplate, own: Any) -> None:
        for probe in list_probes(template):
            mine, sent = (one.encode(probe, add_special_tokens=False) for one in (template.tokenizer, own))
            require_equal_ids(key, template, "tokenizer", "text", mine, sent, OTHER_TOKENIZER)
        names, others = template.tokenizer.get_vocab(), own.get_vocab()
        if names != others:
            name = min(
                (one for one in names.keys() | others.keys() if names.get(one) != others.get(one)),
                key=lambda one: (names.get(one, math.inf), one),
            )
            raise ConfigError(
                f"{key}: has a different tokenizer from {template.model_dir}: {name!r} is token {others.get(name)} "
                f"there and {names.get(name)} here. {OTHER_TOKENIZER}"
            )


class DistillData(TrainingData):
    """The cases that the model answers, the rows whose answers it learns from, and the teacher.

    Args:
        config: Config of the run, with a ``distill`` section.
        tasks: The cases; None if no answer of a step is the model's own.
        prepared: The rows; None if all are.
        teacher: The teacher; None on ranks other than 0 if it is a server.
    """

    loader = None

    def __init__(
        self,
        config: RunConfig,
        tasks: PolicyTasks | None,
        prepared: PreparedSet | None,
        teacher: LocalTeacher | TeacherServer | None,
    ):
        assert config.distill is not None
        self._distill, self._tasks, self._prepared, self.teacher = config.distill, tasks, prepared, teacher
        rows = None if prepared is None else prepared.fingerprint
        self._inputs = {"teacher": distributed.run_on_rank_0(self._describe_teacher), "rows": rows}

    @property
    def prepared(self) -> PreparedSet | None:
        """Prepared set of the rows; None without rows."""
        return self._prepared

    def describe(self) -> dict[str, Any]:
        """Return the description of the rows, or of the cases without rows, and the teacher's."""
        described = self._tasks.describe() if self._prepared is None and self._tasks is not None else {}
        if self._prepared is not None:
            described = self._prepared.describe()
        return described | {"teacher": self._distill.teacher or self._inputs["teacher"]}

    def count_steps(self, config: RunConfig, world: World) -> int:
        """Return the number of optimizer steps: those of ``epochs`` passes over the cases, or else the rows."""
        if self._tasks is not None:
            return self._tasks.count_steps(config, world)
        assert self._prepared is not None
        steps = config.epochs * math.ceil(len(list_rows(self._prepared)) / self._distill.rows_per_step)
        return steps if config.max_steps is None else min(steps, config.max_steps)

    def check_resume(self, resume: Resume) -> None:
        """Check that the teacher and the rows are those of the checkpoint."""
        state = resume.state["loader"]
        pairs = [(name, state.get(name), value) for name, value in self._inputs.items()]
        if changes := [f"{name}: was {before}, is {value}" for name, before, value in pairs if before != value]:
            raise DataError(
                f"the teacher or the rows differ from those of the checkpoint ({', '.join(changes)}). Restore the "
                "previous ones, or start a new run in another output_dir."
            )

    def open_source(self, planned: PlannedRun, stop_if_requested: Callable[[], None]) -> DistillSource:
        """Return the source of steps on the model's own answers and on rows."""
        source = None if self._tasks is None else self._tasks.open_source(planned, stop_if_requested)
        server = self.teacher if isinstance(self.teacher, TeacherServer) else None
        return DistillSource(planned, source, self._prepared, server, self._inputs, stop_if_requested)

    def _describe_teacher(self) -> str:
        assert self.teacher is not None
        return self.teacher.digest() if isinstance(self.teacher, LocalTeacher) else self.teacher.describe()


def list_rows(prepared: PreparedSet) -> np.ndarray:
    """Return the indices of the training conversations of a prepared set, int64 ``[n]``."""
    return np.sort(prepared.packs["train"][0])


class DistillSource:
    """Supplies the inputs of each step of a distillation. Every rank calls every method.

    Args:
        planned: The run.
        rollouts: Source of the model's own answers; None if there are none.
        prepared: Rows; None if there are none.
        server: The teacher on rank 0, if it is a server.
        inputs: What checkpoints record of teacher and rows.
        meanwhile: Called on every rank while they wait for a server; may end the wait with an error.
    """

    def __init__(
        self,
        planned: PlannedRun,
        rollouts: RolloutSource | None,
        prepared: PreparedSet | None,
        server: TeacherServer | None,
        inputs: dict[str, str | None],
        meanwhile: Callable[[], None],
    ):
        config = planned.config
        assert config.distill is not None
        self._config, self._distill, self._world, self._model = config, config.distill, planned.world, planned.model
        self._rollouts, self._prepared, self._server, self._inputs = rollouts, prepared, server, inputs
        self._rows = np.zeros(0, dtype=np.int64) if prepared is None else list_rows(prepared)
        self._meanwhile = meanwhile

    def __enter__(self) -> DistillSource:
        if self._rollouts is not None:
            self._rollouts.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.close()
        if self._rollouts is not None:
            self._rollouts.__exit__(kind, error, trace)

    def take(self, step: int) -> StepData:
        """Return this rank's inputs of global step ``step``; waits for the answers, and for a teacher on a server."""
        trained: list[TrainedRollout] = []
        epoch, metrics = self._epoch_of_rows(step), dict[str, float]()
        if self._rollouts is not None:
            answers, epoch, metrics = self._rollouts.take_answers(step)
            trained += answers
        rows = self._rows_of(step)
        trained += [TrainedRollout(row, 0.0) for row in rows]
        metrics |= {"answers_from_rows": len(rows)}
        if self._distill.teacher_server is not None:
            started = time.perf_counter()
            trained = self._score(trained)
            metrics |= {"teacher_time_s": time.perf_counter() - started}
        options: dict[str, Any] = {"step": step, "epoch": epoch, "metrics": metrics, "cost": self._model.row_cost}
        return make_step_data(trained, self._config, self._world, self._model.make_bounds, **options)

    def state_at(self, step: int) -> dict[str, Any]:
        """Return the state for a checkpoint after ``step``; rows follow from the number of the step."""
        rollouts = None if self._rollouts is None else self._rollouts.state_at(step)
        epoch = self._epoch_of_rows(step) if rollouts is None else rollouts["epoch"]
        return {"epoch": epoch, "seed": self._config.seed, "rollouts": rollouts, **self._inputs}

    def resume_at(self, state: dict[str, Any]) -> None:
        """Continue after the step at which this state was saved.

        Raises:
            DataError: The state belongs to other cases or to another seed.
        """
        if self._rollouts is not None:
            self._rollouts.resume_at(state["rollouts"])

    def _epoch_of_rows(self, step: int) -> int:
        return 0 if not len(self._rows) else (step - 1) * self._distill.rows_per_step // len(self._rows)

    def _rows_of(self, step: int) -> list[Rollout]:
        """Return the rows of a step, shuffled anew in each pass, as rollouts that none of our policies wrote."""
        count, size = self._distill.rows_per_step, len(self._rows)
        if not count:
            return []
        numbers = np.arange((step - 1) * count, step * count)
        orders = {epoch: shuffled(size, self._config.seed, epoch) for epoch in np.unique(numbers // size).tolist()}
        assert self._prepared is not None
        made = [to_rollout(self._prepared, int(self._rows[orders[n // size][n % size]])) for n in numbers.tolist()]
        self._prepared.release_pages()
        return made

    def _score(self, trained: Sequence[TrainedRollout]) -> list[TrainedRollout]:
        """Return the rollouts with the teacher's scores, which rank 0 requests."""
        sequences = []
        for one in trained:
            start = len(one.rollout.prompt_ids)
            positions = [start + i for i, is_generated in enumerate(one.rollout.is_generated) if is_generated]
            sequences.append(((*one.rollout.prompt_ids, *one.rollout.ids), positions))

        def ask() -> list[Any]:
            assert self._server is not None
            return self._server.score(sequences)

        scores = distributed.run_long_on_rank_0(ask, self._meanwhile)
        return [replace(one, scores=score) for one, score in zip(trained, scores, strict=True)]


def to_rollout(prepared: PreparedSet, row: int) -> Rollout:
    """Return a conversation of a prepared set in the form of a rollout whose generated ids are the supervised ones."""
    span = slice(*prepared.offsets[row : row + 2])
    ids = tuple(prepared.tokens[span].tolist())
    is_supervised = (prepared.weights[prepared.codes[span]] > 0).tolist()
    start = max(1, is_supervised.index(True))  # the first token is never predicted
    case_id = f"row {hashlib.blake2b(int(prepared.digests[row]).to_bytes(8, 'little'), digest_size=4).hexdigest()}"
    after = tuple(is_supervised[start:])
    return Rollout(case_id, 0, "row", 0, ids[:start], ids[start:], after, (0.0,) * len(after))


class DistillTuning(FineTuning):
    """A run that learns from a teacher's distributions; a recipe adds which parameters train."""

    def select_trainable_(self, model: CausalLM) -> None:
        """Select what trains; a server's answers follow from no adapters on experts.

        Raises:
            ConfigError: A server generates, and adapters on experts or routers are selected, which it would ignore.
        """
        super().select_trainable_(model)  # type: ignore[safe-super]  # that of the recipe's other base
        check_served_adapters(model, self.requested_config)

    def objective(self) -> DistillObjective:
        """Return the divergence from the teacher, whose weights are loaded here if it is in this process."""
        config, planned = self.requested_config, self.training.planned
        assert config.distill is not None
        assert isinstance(planned.data, DistillData)
        teacher = planned.data.teacher
        if not isinstance(teacher, LocalTeacher):
            return DistillObjective(config.distill)
        loaded = teacher.load(planned.model, self.world)
        size = sum(p.numel() for p in loaded.parameters())
        logger.info("teacher: %s, %s parameters, frozen, a copy on each rank", teacher.model_dir, f"{size:,}")
        return DistillObjective(config.distill, loaded)

    def open_data(self) -> tuple[RunConfig, DistillData]:
        """Return the config as it is, and the cases, rows and teacher of the ``distill`` section, checked."""
        config = self.requested_config
        assert config.distill is not None
        distill = config.distill
        prepared = None
        if distill.rows_per_step:
            prepared = prepare_data(config, self.model_dir, self.chat_template, self.world)
            if not len(list_rows(prepared)):
                raise DataError("the training split has no conversations. Add rows, or lower data.validation_share.")
        options: dict[str, Any] = {"template_args": config.model.template_args, "chat_template": self.chat_template}

        def open_teacher() -> LocalTeacher | TeacherServer:
            template = ChatTemplate(self.model_dir, **options)
            if distill.teacher is not None:
                return LocalTeacher(distill.teacher, template, config.data.row_tokens)
            assert distill.teacher_server is not None
            key = read_environment().get("FCTUNE_TEACHER_API_KEY") or None
            return TeacherServer(distill.teacher_server, template, config.data.row_tokens, key, logger.warning)

        teacher: LocalTeacher | TeacherServer | None
        if distill.teacher is not None:
            distributed.run_on_rank_0(lambda: resolve_model_dir(distill.teacher or ""))  # one download
            teacher = distributed.run_on_all_ranks(open_teacher)
        else:
            opened: list[LocalTeacher | TeacherServer] = []
            distributed.run_on_rank_0(lambda: opened.append(open_teacher()))
            teacher = opened[0] if opened else None

        def open_tasks() -> PolicyTasks | None:
            if config.rollouts is None:
                return None
            return PolicyTasks(config, ChatTemplate(self.model_dir, **options), self.world.rank)

        return config, DistillData(config, distributed.run_on_all_ranks(open_tasks), prepared, teacher)
