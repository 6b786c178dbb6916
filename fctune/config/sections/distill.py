"""Distillation: a teacher's distributions over the next token, on the model's own answers and on rows."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated, ClassVar

from fctune.config.fields import AT_LEAST_1, MAY_CHANGE, SAME_CONTENT, SHARE, Null, Range, SectionProblems, join_key
from fctune.config.sections.grpo import Advantage
from fctune.config.sections.rollouts import RolloutConfig
from fctune.config.server_address import find_address_problem


@dataclass(kw_only=True, slots=True)
class TeacherServerConfig:
    """A vLLM server, or one with its `prompt_logprobs` and `/tokenize`, that serves the teacher."""

    url: Annotated[str, MAY_CHANGE]
    """Address, with or without `/v1`. An API key is read from FCTUNE_TEACHER_API_KEY."""
    served_model: Annotated[str | None, Null("the only one"), MAY_CHANGE] = None
    """Name of the teacher on the server."""
    top_k: Annotated[int, AT_LEAST_1] = 20
    """Tokens of each position whose log-probabilities the teacher sends; all others count as one. vLLM sends more than
    20 if it was started with `--max-logprobs`."""
    concurrency: Annotated[int, AT_LEAST_1, MAY_CHANGE] = 16
    """Largest number of requests in flight."""
    max_wait_s: Annotated[float, Range(gt=0), MAY_CHANGE] = 1800.0
    """Seconds to wait for a server that is lost; then the run ends, and the same command resumes it."""

    def check(self, where: str, problems: SectionProblems) -> None:
        """Check the server's address."""
        if (problem := find_address_problem(self.url, join_key(where, "url"))) is not None:
            problems.add(("url",), problem)


@dataclass(kw_only=True, slots=True)
class DistillConfig(RolloutConfig):
    """Generalized knowledge distillation (arXiv:2306.13649): the divergence from a teacher at each token of the model's
    own answers to `cases`, and of the rows in `data.sources`. A step has `answers_per_step` of both, so
    `global_batch_size` is not used; `epochs` are passes over the cases, or over the rows if no case is answered.
    """

    section: ClassVar[str] = "distill"
    # Rollouts as GRPO has them, without comparing answers.
    group_size: ClassVar[int] = 1
    advantage: ClassVar[Advantage] = "unbiased"
    updates_per_batch: ClassVar[int] = 1
    drop_flat_groups: ClassVar[bool] = False
    max_refills: ClassVar[int] = 2
    max_flat_batches: ClassVar[int] = 1
    mask_cut: ClassVar[bool] = False
    reward: ClassVar[dict[str, float] | None] = None

    cases: Annotated[str, SAME_CONTENT] = ""
    """JSONL file of cases (`fctune data cases`), suite in YAML, `synthetic:SPLIT:ROWS[:SEED]`, or multi-turn dialogues
    (see `dialogue`), which the model answers. Required unless `on_policy_share` is 0."""
    teacher: Annotated[str | None, Null("a server"), SAME_CONTENT] = None
    """Model directory or `hf:NAME@REVISION` of a teacher in this process, a copy on each rank; the divergence is over
    the full vocabulary. Its tokenizer must be that of the model in training."""
    teacher_server: Annotated[TeacherServerConfig | None, Null("the teacher is in this process")] = None
    """The teacher, in place of `teacher`."""
    answers_per_step: Annotated[int, AT_LEAST_1] = 16
    """Answers of each optimizer step, of the model and from rows."""
    on_policy_share: Annotated[float, SHARE] = 1.0
    """Share of these that the model in training writes (GKD's lambda), rounded to whole answers; the rest are
    conversations from `data.sources`."""
    beta: Annotated[float, SHARE] = 1.0
    """Divergence: 1 is the reverse one, KL(student || teacher); 0 the forward one, KL(teacher || student); between them
    the generalized Jensen-Shannon divergence."""

    @property
    def prompts_per_step(self) -> int:
        """Answers of each step that the model in training writes."""
        return round(self.answers_per_step * self.on_policy_share)

    @property
    def rows_per_step(self) -> int:
        """Conversations of each step that come from rows."""
        return self.answers_per_step - self.prompts_per_step

    @property
    def answers_per_batch(self) -> int:
        """Answers of each step that the model in training writes; each case has one."""
        return self.prompts_per_step

    def check(self, where: str, problems: SectionProblems) -> None:
        """Check the cases, that there is one teacher, and that the shares are of whole answers."""
        key = join_key(where, "teacher")
        if (self.teacher is None) == (self.teacher_server is None):
            found = "missing" if self.teacher is None else f"{self.teacher}: {key}_server is set, too"
            problems.add(
                ("teacher", "teacher_server"),
                f"{key}: {found}; set {key} to a model directory, or {key}_server to {{url: ADDRESS}}",
            )
        elif self.teacher is not None and not self.teacher.startswith("hf:") and not os.path.isdir(self.teacher):
            problems.add(("teacher",), f"{key}={self.teacher}: no such directory; name a Hugging Face model directory")
        share = join_key(where, "on_policy_share")
        if (self.prompts_per_step == 0) != (self.on_policy_share == 0) or (
            (self.rows_per_step == 0) != (self.on_policy_share == 1)
        ):
            answers = join_key(where, "answers_per_step")
            problems.add(
                ("on_policy_share", "answers_per_step"),
                f"{share}={self.on_policy_share:g}: of {answers}={self.answers_per_step}, this is "
                f"{self.prompts_per_step}; raise {answers}",
            )
        if self.on_policy_share > 0 and not self.cases:
            problems.add(
                ("cases", "on_policy_share"),
                f"{join_key(where, 'cases')}: missing, so the model has nothing to answer; name cases, or set "
                f"{share}=0 to distill on rows alone",
            )
        elif self.on_policy_share > 0:
            RolloutConfig.check(self, where, problems)
        elif self.cases:
            problems.add(
                ("cases", "on_policy_share"),
                f"{join_key(where, 'cases')}={self.cases}: with {share}=0 no case is answered; remove it",
            )
