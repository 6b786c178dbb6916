"""Config of rollouts: the cases, the engine that answers them, the judge, and limits of multi-turn dialogues."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

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
from fctune.config.server_address import find_address_problem

ENVIRONMENT, RECORDED, MCP = "environment:", "recorded:", "mcp:"
VERIFIERS, AGENT = "verifiers:", "agent:"
"""How ``cases`` names tasks in environments, rows with recorded results, tasks with an MCP server, in environments of
the verifiers package, and of an agent.
"""

_TASKS = re.compile(r"environment:(?P<names>[^,]+(?:,[^,]+)*):(?P<num_tasks>[1-9][0-9]*)")


@dataclass(kw_only=True, slots=True)
class ServerConfig:
    """The vLLM servers that generate; `fctune serve BASE --adapters RANK` starts one."""

    url: str
    """Address, with or without `/v1`, or several with commas between: servers of the same base, among which dialogues
    are divided. An API key is read from FCTUNE_API_KEY."""
    publish_dir: Annotated[str | None, Null("`OUTPUT_DIR/policies`")] = None
    """Directory for each version's adapter, which trainer and server see under the same path."""
    served_model: Annotated[str | None, Null("the only one")] = None
    """Name of the base on the server."""
    concurrency: Annotated[int, AT_LEAST_1] = 64
    """Largest number of requests in flight, on each server."""
    max_wait_s: Annotated[float, Range(gt=0)] = 1800.0
    """Seconds to wait for an unavailable server; then the run ends, and the same command resumes it."""
    sleeps_while_training: bool = False
    """The server shares the trainer's GPUs: it gives up its memory before each optimizer step and gets it back before
    the next answers. Takes `max_staleness: 0`, and vLLM with `--enable-sleep-mode` and `VLLM_SERVER_DEV_MODE=1`."""

    @property
    def urls(self) -> list[str]:
        """Addresses of the servers."""
        return [url.strip() for url in self.url.split(",")]

    def check(self, where: str, problems: SectionProblems) -> None:
        """Check the servers' addresses."""
        for url in self.urls:
            if (problem := find_address_problem(url, join_key(where, "url"))) is not None:
                problems.add(("url",), problem)
        if len(set(self.urls)) < len(self.urls):
            problems.add(("url",), f"{join_key(where, 'url')}={self.url}: names a server twice")


@dataclass(kw_only=True, slots=True)
class JudgeConfig:
    """A language model that scores answers in words, behind any server with OpenAI's API. Its score is the part `judge`
    of the reward. Exact verdicts come first: it is asked only where an answer in words is due and given.
    """

    url: Annotated[str, MAY_CHANGE]
    """Address, with or without `/v1`. An API key is read from FCTUNE_JUDGE_API_KEY."""
    rubric: str
    """What a good answer is, in words; the judge scores from 0 to 10."""
    model: Annotated[str | None, Null("the only one")] = None
    """Name of the model on the server."""
    agreement_share: Annotated[float, SHARE, MAY_CHANGE] = 0.1
    """Share of the answers with an exact verdict that the judge scores as well, only to measure how often both agree
    (`judge_agreement`, `judge_kappa`)."""
    cache: Annotated[str | None, Null("`OUTPUT_DIR/judge`"), MAY_CHANGE] = None
    """Directory of scores, which are never asked for again for the same model, rubric, question and answer; runs may
    share it."""
    concurrency: Annotated[int, AT_LEAST_1, MAY_CHANGE] = 16
    """Largest number of requests in flight."""
    timeout_s: Annotated[float, Range(gt=0), MAY_CHANGE] = 60.0
    """Time limit of an attempt, in seconds; each request has three."""
    max_new_tokens: Annotated[int, AT_LEAST_1] = 512
    """Maximum length of the judge's reply in tokens, with its reasoning."""

    def check(self, where: str, problems: SectionProblems) -> None:
        """Check the server's address, and that there is a rubric."""
        if (problem := find_address_problem(self.url, join_key(where, "url"))) is not None:
            problems.add(("url",), problem)
        if not self.rubric.strip():
            problems.add(("rubric",), f"{join_key(where, 'rubric')}: empty; say what a good answer is")


@dataclass(kw_only=True, slots=True)
class DialogueConfig:
    """Limits of multi-turn dialogues, for `environment:`, `mcp:`, `verifiers:` and `recorded:` cases."""

    max_turns: Annotated[int, AT_LEAST_1] = 8
    """Maximum number of the model's answers in a dialogue."""
    call_timeout_s: Annotated[float, Range(gt=0)] = 5.0
    """Time limit of a call in an environment or of a server, in seconds."""
    episode_timeout_s: Annotated[float, Range(gt=0)] = 120.0
    """Time limit of all calls of a dialogue with an MCP server together, with its start, or of a verifiers
    environment's share in a dialogue, with its scoring, in seconds."""
    memory_gib: Annotated[float, Range(gt=0)] = 2.0
    """Memory limit of an environment's process, in GiB."""
    max_result_bytes: Annotated[int, AT_LEAST_1] = 262_144
    """Largest size of a result, or of an environment's state, as JSON, in bytes."""
    replay: Annotated[str | None, Null("the server is asked")] = None
    """Results in place of an MCP server: the folder `mcp_calls` of an earlier run."""


@dataclass(kw_only=True, slots=True)
class RolloutConfig:
    """How the model in training answers cases: the part that sections with rollouts share."""

    section: ClassVar[str]
    """Name of the section."""

    cases: Annotated[str, SAME_CONTENT]
    """JSONL file of cases (`fctune data cases`), suite in YAML, `synthetic:SPLIT:ROWS[:SEED]`, or multi-turn dialogues
    (see `dialogue`)."""
    force_benchmark: bool = False
    """Allow cases of a benchmark, which can then no longer measure the model."""
    category_shares: Annotated[dict[str, float] | None, Null("as among the cases")] = None
    """Share of categories among the cases of a batch, such as `{no_call: 0.3}`; the other categories share the rest. A
    dropped group is replaced by a case of the same category. Cases from `fctune data cases` have the categories `call`
    and `no_call`. Not for dialogues."""
    max_new_tokens: Annotated[int, AT_LEAST_1] = 256
    """Maximum length of an answer in tokens; prompt and answer together must fit in `data.seq_len`."""
    temperature: Annotated[float, Range(gt=0)] = 1.0
    """Temperature of the answers. At any value other than 1, answers come from a slightly different distribution from
    the one that is trained, because log-probabilities are taken before the temperature is applied."""
    engine: Annotated[Literal["in_process", "server"], MAY_CHANGE] = "in_process"
    """Engine that generates: the model in training, gathered on each rank, or a server."""
    generation_batch_size: Annotated[int, AT_LEAST_1, MAY_CHANGE] = 64
    """Answers that a rank generates at once, in process."""
    server: Annotated[ServerConfig | None, Null("none"), MAY_CHANGE] = None
    """The server, with `engine: server`."""
    dialogue: DialogueConfig = field(default_factory=DialogueConfig)
    """Limits of dialogues, which `cases` names as `environment:NAMES:TASKS`, such as `environment:files,shop:1000`, as
    `mcp:FILE`, a file of tasks with an MCP server, as `verifiers:FILE`, an environment of the verifiers package, as
    `agent:FILE`, tasks of an agent, or as `recorded:ROWS`, a file of rows with calls and their results
    (docs/environments.md). Their rewards have different parts: `solved`, `progress`, in environments and with MCP
    servers `economy` and `validity`, in verifiers environments and of agents `score`, and `random`. An agent's file
    has its limits."""
    max_staleness: Annotated[int, AT_LEAST_0, MAY_CHANGE] = 1
    """Batches that a server generates ahead of the one in training, whose dialogues continue while policies change;
    answers are at most this many batches old. 0: none, and a step waits for its slowest dialogue. In process it is
    always 0."""

    @property
    def num_at_once(self) -> int:
        """Dialogues that servers answer at a time."""
        return 64 if self.server is None else self.server.concurrency * len(self.server.urls)

    @property
    def shares_gpus(self) -> bool:
        """True if the servers answer on the GPUs that train, between steps."""
        return self.server is not None and self.server.sleeps_while_training

    def check(self, where: str, problems: SectionProblems) -> None:
        """Check that local cases exist, and that a server is named if one generates."""
        if (self.engine == "server") != (self.server is not None):
            key, other = join_key(where, "engine"), join_key(where, "server")
            remedy = f"set {other}.url" if self.server is None else f"remove {other}, or set {key}=server"
            problems.add(
                ("engine", "server"),
                f"{key}={self.engine}: {other} is required by engine=server, and only by that; {remedy}",
            )
        if self.shares_gpus and self.max_staleness > 0:
            key = join_key(where, "max_staleness")
            problems.add(
                ("max_staleness", "server"),
                f"{key}={self.max_staleness}: {join_key(where, 'server')}.sleeps_while_training=true lets no server "
                f"answer during the steps, and staleness means that it does; set {key}=0, or give the server GPUs of "
                "its own and remove sleeps_while_training",
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


def is_dialogue_source(cases: str) -> bool:
    """Return True if ``cases`` names multi-turn dialogues."""
    return cases.startswith((ENVIRONMENT, RECORDED, MCP, VERIFIERS, AGENT))


def parse_environments(cases: str) -> tuple[list[str], int] | None:
    """Return the environments' names and the number of tasks of each; None if the text has another form."""
    found = _TASKS.fullmatch(cases)
    return None if found is None else (found["names"].split(","), int(found["num_tasks"]))


def find_source_problems(cases: str, key: str) -> list[str]:
    """Return what is wrong with the source of dialogues; ``key`` names the config key or option, with its ``=``."""
    if cases.startswith(ENVIRONMENT) and parse_environments(cases) is None:
        return [f"{key}{cases}: expected environment:NAMES:TASKS, such as environment:files,shop:1000"]
    path = cases.removeprefix(RECORDED)
    if cases.startswith(RECORDED) and "://" not in path and not path.startswith("hf:") and not os.path.isfile(path):
        return [f"{key}{cases}: {path} does not exist; name a file of rows with calls and their results"]
    path = cases.removeprefix(MCP)
    if cases.startswith(MCP) and not os.path.isfile(path):
        return [f"{key}{cases}: {path} does not exist; name a file of tasks with an MCP server"]
    path = cases.removeprefix(AGENT)
    if cases.startswith(AGENT) and not os.path.isfile(path):
        return [f"{key}{cases}: {path} does not exist; name a file of tasks for an agent"]
    path = cases.removeprefix(VERIFIERS)
    if cases.startswith(VERIFIERS) and not os.path.isfile(path):
        return [f"{key}{cases}: {path} does not exist; name a file with env, the config of a verifiers environment"]
    return []
