"""Reinforcement learning from verdicts: rollouts, rewards, advantages and the clipped loss."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from typing import Annotated, Literal

from fctune.config.fields import (
    AT_LEAST_0,
    AT_LEAST_1,
    MAY_CHANGE,
    SAME_CONTENT,
    SHARE,
    Null,
    Range,
    SectionProblems,
    join_key,
)
from fctune.config.parsing import describe_no_file
from fctune.config.sections.rollouts import (
    MCP,
    DialogueConfig,
    ServerConfig,
    find_source_problems,
    is_dialogue_source,
)

PolicyLoss = Literal["grpo", "dapo", "gspo", "dr_grpo"]
Advantage = Literal["group", "unbiased", "leave_one_out"]

# Clips where none are given: those of each paper's main experiments.
_CLIPS: dict[PolicyLoss, tuple[float, float]] = {
    "grpo": (0.2, 0.2),
    "dapo": (0.2, 0.28),
    "gspo": (3e-4, 4e-4),
    "dr_grpo": (0.2, 0.2),
}


@dataclass(kw_only=True, slots=True)
class GRPOConfig:
    """Groups of answers to each case, rewarded by the judge, and the policy loss. A step's batch is all of its answers,
    so `global_batch_size` is not used; `epochs` are passes over the cases.
    """

    cases: Annotated[str, SAME_CONTENT]
    """JSONL file of cases (`fctune data cases`), suite in YAML, `synthetic:SPLIT:ROWS[:SEED]`, or multi-turn dialogues
    (see `dialogue`)."""
    force_benchmark: bool = False
    """Allow cases of a benchmark, which can then no longer measure the model."""
    category_shares: Annotated[dict[str, float] | None, Null("as among the cases")] = None
    """Share of categories among the cases of a batch, such as `{no_call: 0.3}`; the other categories share the rest. A
    dropped group is replaced by a case of the same category. Cases from `fctune data cases` have the categories `call`
    and `no_call`. Not for dialogues."""
    prompts_per_step: Annotated[int, AT_LEAST_1] = 16
    """Cases of each batch of rollouts."""
    group_size: Annotated[int, Range(ge=2)] = 8
    """Answers to each case; an advantage compares an answer with the others of its group."""
    max_new_tokens: Annotated[int, AT_LEAST_1] = 256
    """Maximum length of an answer in tokens; prompt and answer together must fit in `data.seq_len`."""
    temperature: Annotated[float, Range(gt=0)] = 1.0
    """Temperature of the answers. At any value other than 1, answers come from a slightly different distribution from
    the one that is trained, because log-probabilities are taken before the temperature is applied."""
    # Not a default mapping, which given parts would be added to.
    reward: Annotated[dict[str, float] | None, Null("`strict: 1`; in dialogues see docs/environments.md")] = None
    """Weight of each part of the reward: `strict`, `lenient`, `names`, `arguments`, `schema`, `format`, `brevity`, and
    `random` as a control."""
    advantage: Advantage = "group"
    """Advantage of an answer: `group`, its reward minus the group's mean, over the group's standard deviation
    (arXiv:2402.03300); `unbiased`, without the division (arXiv:2503.20783); `leave_one_out`, its reward minus the mean
    of the others (arXiv:2402.14740)."""
    loss: PolicyLoss = "dapo"
    """Clipped loss: `grpo`, a mean over tokens, then over answers (arXiv:2402.03300); `dapo`, one mean over all tokens
    and a higher upper clip (arXiv:2503.14476); `gspo`, one ratio for each answer (arXiv:2507.18071); `dr_grpo`, a sum
    over tokens divided by a constant, `max_new_tokens` for each answer of the batch, masked ones included, so that
    length has no influence (arXiv:2503.20783)."""
    clip_low: Annotated[float | None, Range(gt=0, lt=1), Null("0.2; 3e-4 for `gspo`")] = None
    """The ratio is clipped at 1 minus this."""
    clip_high: Annotated[float | None, Range(gt=0), Null("0.2; 0.28 for `dapo`, 4e-4 for `gspo`")] = None
    """The ratio is clipped at 1 plus this."""
    kl_beta: Annotated[float, AT_LEAST_0] = 0.0
    """Weight of the divergence from the base with its adapter switched off, which takes one more forward pass per step;
    0: none."""
    updates_per_batch: Annotated[int, AT_LEAST_1] = 1
    """Optimizer steps on each batch of rollouts."""
    ratio_cap: Annotated[float, Range(gt=1)] = 2.0
    """Largest weight that corrects a token for the difference between the policy that generated it and the one in
    training (truncated importance sampling), with one update per batch. With several updates, the ratio itself is
    clipped."""
    drop_flat_groups: bool = True
    """Drop groups whose answers all have the same reward, which teach nothing, and use further cases instead."""
    max_refills: Annotated[int, AT_LEAST_0] = 2
    """Rounds of replacement cases per batch; after the last one, the batch is trained as it is. With batches ahead, a
    round is `prompts_per_step` cases."""
    max_flat_batches: Annotated[int, AT_LEAST_1, MAY_CHANGE] = 10
    """End the run after this many batches in a row without any group to learn from."""
    mask_cut: bool = True
    """Do not train answers that `max_new_tokens` cut off; they count in their group's mean."""
    engine: Annotated[Literal["in_process", "server"], MAY_CHANGE] = "in_process"
    """Engine that generates: the model in training, gathered on each rank, or a server."""
    generation_batch_size: Annotated[int, AT_LEAST_1, MAY_CHANGE] = 64
    """Answers that a rank generates at once, in process."""
    server: Annotated[ServerConfig | None, Null("none"), MAY_CHANGE] = None
    """The server, with `engine: server`."""
    dialogue: DialogueConfig = field(default_factory=DialogueConfig)
    """Limits of dialogues, which `cases` names as `environment:NAMES:TASKS`, such as `environment:files,shop:1000`, as
    `mcp:FILE`, a file of tasks with an MCP server, or as `recorded:ROWS`, a file of rows with calls and their results
    (docs/environments.md). Their rewards have different parts: `solved`, `progress`, in environments and with MCP
    servers `economy` and `validity`, and `random`."""
    max_staleness: Annotated[int, AT_LEAST_0, MAY_CHANGE] = 1
    """Batches that a server generates ahead of the one in training, whose dialogues continue while policies change;
    answers are at most this many batches old. 0: none, and a step waits for its slowest dialogue. In process it is
    always 0."""

    @property
    def clips(self) -> tuple[float, float]:
        """The configured lower and upper clip, or the defaults of the loss."""
        low, high = _CLIPS[self.loss]
        return (low if self.clip_low is None else self.clip_low, high if self.clip_high is None else self.clip_high)

    @property
    def answers_per_batch(self) -> int:
        """Answers of a batch in which no group is dropped."""
        return self.prompts_per_step * self.group_size

    @property
    def num_at_once(self) -> int:
        """Dialogues that servers answer at a time."""
        return 64 if self.server is None else self.server.concurrency * len(self.server.urls)

    def check(self, where: str, problems: SectionProblems) -> None:
        """Check that local cases exist, and that a server is named if one generates."""
        if (self.engine == "server") != (self.server is not None):
            key, other = join_key(where, "engine"), join_key(where, "server")
            remedy = f"set {other}.url" if self.server is None else f"remove {other}, or set {key}=server"
            problems.add(
                ("engine", "server"),
                f"{key}={self.engine}: {other} is required by engine=server, and only by that; {remedy}",
            )
        self._check_shares(join_key(where, "category_shares"), problems)
        if is_dialogue_source(self.cases):
            for problem in find_source_problems(self.cases, f"{join_key(where, 'cases')}="):
                problems.add(("cases",), problem)
            replay, key = self.dialogue.replay, join_key(where, "dialogue.replay")
            if replay is not None and not self.cases.startswith(MCP):
                problems.add(("cases", "dialogue"), f"{key}: only for cases of an MCP server; remove it")
            elif replay is not None and not os.path.exists(replay):
                problems.add(("dialogue",), f"{key}={replay}: does not exist; name the folder mcp_calls of a run")
        elif not self.cases.startswith("synthetic:") and not os.path.isfile(self.cases):
            problems.add(
                ("cases",),
                f"{join_key(where, 'cases')}={self.cases}: {describe_no_file(self.cases)}; make one with "
                "fctune data cases ROWS --out FILE",
            )

    def _check_shares(self, key: str, problems: SectionProblems) -> None:
        """Check that the shares are shares of a batch of single turns."""
        if self.category_shares is None:
            return
        if is_dialogue_source(self.cases):
            problems.add(
                ("category_shares", "cases"), f"{key}: only for cases of one turn, not for {self.cases}; remove it"
            )
        wrong = {name: share for name, share in self.category_shares.items() if not SHARE.contains(share)}
        for name, share in wrong.items():
            problems.add(("category_shares",), f"{key}.{name}={share}: expected {SHARE.describe()}")
        if not wrong and (total := math.fsum(self.category_shares.values())) > 1 + 1e-9:
            problems.add(("category_shares",), f"{key}: the shares sum to {total:g}; expected at most 1")
        if not self.category_shares:
            problems.add(("category_shares",), f"{key}={{}}: empty; write e.g. {{no_call: 0.3}}, or remove the key")
