"""Config of rollouts: the servers of the policy and of the judge, and limits of multi-turn dialogues."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Annotated

from fctune.config.fields import AT_LEAST_1, MAY_CHANGE, SHARE, Null, Range, SectionProblems, join_key
from fctune.config.server_address import find_address_problem

ENVIRONMENT, RECORDED, MCP, VERIFIERS = "environment:", "recorded:", "mcp:", "verifiers:"
"""How ``grpo.cases`` names tasks in environments, rows with recorded results, tasks with an MCP server, and tasks in
environments of the verifiers package.
"""

_TASKS = re.compile(r"environment:(?P<names>[^,]+(?:,[^,]+)*):(?P<num_tasks>[1-9][0-9]*)")


@dataclass(kw_only=True, slots=True)
class ServerConfig:
    """A vLLM server that generates; `fctune serve BASE --adapters RANK` starts one."""

    url: str
    """Address, with or without `/v1`. An API key is read from FCTUNE_API_KEY."""
    publish_dir: Annotated[str | None, Null("`OUTPUT_DIR/policies`")] = None
    """Directory for each version's adapter, which trainer and server see under the same path."""
    served_model: Annotated[str | None, Null("the only one")] = None
    """Name of the base on the server."""
    concurrency: Annotated[int, AT_LEAST_1] = 64
    """Largest number of requests in flight."""
    max_wait_s: Annotated[float, Range(gt=0)] = 1800.0
    """Seconds to wait for an unavailable server; then the run ends, and the same command resumes it."""

    def check(self, where: str, problems: SectionProblems) -> None:
        """Check the server's address."""
        if (problem := find_address_problem(self.url, join_key(where, "url"))) is not None:
            problems.add(("url",), problem)


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


def is_dialogue_source(cases: str) -> bool:
    """Return True if ``grpo.cases`` names multi-turn dialogues."""
    return cases.startswith((ENVIRONMENT, RECORDED, MCP, VERIFIERS))


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
    path = cases.removeprefix(VERIFIERS)
    if cases.startswith(VERIFIERS) and not os.path.isfile(path):
        return [f"{key}{cases}: {path} does not exist; name a file with env, the config of a verifiers environment"]
    return []
