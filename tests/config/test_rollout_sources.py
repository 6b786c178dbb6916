"""Config of dialogues and servers: every wrong value is one line with what is expected."""

from __future__ import annotations

from pathlib import Path

import pytest

from fctune.base.errors import ConfigError
from fctune.config.fields import SectionProblems
from fctune.config.loading import load_config
from fctune.config.sections.grpo import GRPOConfig
from fctune.config.sections.rollouts import ServerConfig, parse_environments
from tests.conftest import ROOT


def find_problems(config: GRPOConfig) -> list[str]:
    problems = SectionProblems()
    config.check("grpo", problems)
    return problems.lines


@pytest.mark.parametrize(
    ("cases", "parsed"),
    [
        ("environment:files:10", (["files"], 10)),
        ("environment:files,shop:1000", (["files", "shop"], 1000)),
        ("environment:my.module:Thing,shop:5", (["my.module:Thing", "shop"], 5)),
        ("environment:files", None),
        ("environment:files:0", None),
        ("environment::5", None),
        ("environment:files,:5", None),
        ("environment:files:many", None),
    ],
    ids=range(8),
)
def test_environments_are_named_with_their_number_of_tasks(cases: str, parsed: tuple[list[str], int] | None) -> None:
    assert parse_environments(cases) == parsed
    problems = find_problems(GRPOConfig(cases=cases))
    assert bool(problems) == (parsed is None)
    assert all("expected environment:NAMES:TASKS, such as" in problem for problem in problems)


def test_recorded_rows_must_exist(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    assert "does not exist" in find_problems(GRPOConfig(cases=f"recorded:{rows}"))[0]
    rows.write_text("{}")
    assert not find_problems(GRPOConfig(cases=f"recorded:{rows}"))


def test_a_server_is_named_exactly_if_it_generates() -> None:
    cases, server = "environment:files:10", ServerConfig(url="http://127.0.0.1:8000")
    assert not find_problems(GRPOConfig(cases=cases, engine="server", server=server))
    assert "engine=server: grpo.server is required" in find_problems(GRPOConfig(cases=cases, engine="server"))[0]
    assert "engine=in_process" in find_problems(GRPOConfig(cases=cases, server=server))[0]


def test_a_server_that_sleeps_while_the_model_trains_cannot_answer_ahead() -> None:
    server = ServerConfig(url="http://127.0.0.1:8000", sleeps_while_training=True)

    def check(staleness: int) -> list[str]:
        config = GRPOConfig(cases="environment:files:10", engine="server", server=server, max_staleness=staleness)
        return find_problems(config)

    assert not check(0)
    (problem,) = check(1)
    assert "grpo.max_staleness=1: grpo.server.sleeps_while_training=true" in problem
    assert "set grpo.max_staleness=0" in problem


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http://user:hunter2@host:8000", "grpo.server.url: the address contains a password"),
        ("ftp://user:hunter2@host", "grpo.server.url: the address contains a password"),
        ("127.0.0.1:8000", "grpo.server.url: 127.0.0.1:8000 is not a server's address; expected http://HOST:PORT"),
        ("http://host:port", "grpo.server.url: http://host:port is not a server's address"),
    ],
    ids=range(4),
)
def test_the_address_of_a_server_is_checked_with_the_config(url: str, problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(ROOT / "configs" / "tiny_grpo.yaml", ["grpo.engine=server", f"grpo.server.url={url}"])
    assert problem in str(refused.value)
    assert "hunter2" not in str(refused.value)


def test_the_weights_of_a_reward_are_those_given_and_no_others() -> None:
    given = load_config(ROOT / "configs" / "tiny_grpo.yaml", ["grpo.reward={random: 1.0}"]).grpo
    assert given is not None
    assert given.reward == {"random": 1.0}, "a control must not be rewarded for being right"


@pytest.mark.parametrize(
    ("cases", "shares", "words"),
    [
        ("synthetic:train:10", {"no_call": 0.5}, ""),
        ("synthetic:train:10", {"no_call": 1.5}, "grpo.category_shares.no_call=1.5: expected 0 or more and at most 1"),
        ("synthetic:train:10", {"no_call": 0.6, "call": 0.6}, "sum to 1.2; expected at most 1"),
        ("synthetic:train:10", {}, "empty; write e.g. {no_call: 0.3}"),
        ("environment:files:10", {"no_call": 0.5}, "only for cases of one turn, not for environment:files:10"),
    ],
    ids=["right", "too large", "too large together", "empty", "dialogues"],
)
def test_shares_of_categories_are_checked(cases: str, shares: dict[str, float], words: str) -> None:
    problems = find_problems(GRPOConfig(cases=cases, category_shares=shares))
    assert len(problems) == bool(words)
    assert words in "".join(problems)
