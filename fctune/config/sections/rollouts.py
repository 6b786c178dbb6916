"""Config of rollouts: the server of the policy, and limits of multi-turn dialogues."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Annotated

from fctune.config.fields import AT_LEAST_1, Null, Range, SectionProblems, join_key
from fctune.config.server_address import find_address_problem

ENVIRONMENT, RECORDED, MCP = "environment:", "recorded:", "mcp:"
"""How ``grpo.cases`` names tasks in environments, rows with recorded results, and tasks with an MCP server."""

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

    @property
    def urls(self) -> list[str]:
        """The addresses."""
        return [url.strip() for url in self.url.split(",")]

    def check(self, where: str, problems: SectionProblems) -> None:
        """Check the servers' addresses."""
        for url in self.urls:
            if (problem := find_address_problem(url, join_key(where, "url"))) is not None:
                problems.add(("url",), problem)
        if len(set(self.urls)) < len(self.urls):
            problems.add(("url",), f"{join_key(where, 'url')}={self.url}: names a server twice")


@dataclass(kw_only=True, slots=True)
class DialogueConfig:
    """Limits of multi-turn dialogues, for `environment:`, `mcp:` and `recorded:` cases."""

    max_turns: Annotated[int, AT_LEAST_1] = 8
    """Maximum number of the model's answers in a dialogue."""
    call_timeout_s: Annotated[float, Range(gt=0)] = 5.0
    """Time limit of a call in an environment or of an MCP server, in seconds."""
    episode_timeout_s: Annotated[float, Range(gt=0)] = 120.0
    """Time limit of all calls of a dialogue with an MCP server together, with its start, in seconds."""
    memory_gib: Annotated[float, Range(gt=0)] = 2.0
    """Memory limit of an environment's process, in GiB."""
    max_result_bytes: Annotated[int, AT_LEAST_1] = 262_144
    """Largest size of a result, or of an environment's state, as JSON, in bytes."""
    replay: Annotated[str | None, Null("the server is asked")] = None
    """Results in place of an MCP server: the folder `mcp_calls` of an earlier run."""


def is_dialogue_source(cases: str) -> bool:
    """Return True if ``grpo.cases`` names multi-turn dialogues."""
    return cases.startswith((ENVIRONMENT, RECORDED, MCP))


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
    return []
