"""Sampling: several answers to each case, resumable, judged on the one path, and what is chosen of them."""

from __future__ import annotations

import itertools
import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fctune.apps.report.sample_page import write_sample_html
from fctune.base.errors import ConfigError
from fctune.calls.formats.registry import FORMATS
from fctune.data.conversation import Call, Conversation, Message, Tool
from fctune.data.pairs import Pair, PairReader
from fctune.data.sources import UnreadRow, read_source
from fctune.engines.engine import Answer, AnswerTokens, Prompt
from fctune.tasks.evaluation.results import ResultsFile, read_rows
from fctune.tasks.rewards import check_reward, weigh_parts
from fctune.tasks.sampling.run import Budget, choose_ks, estimate_pass_rate, pass_at_k, sample_suite, summarise_samples
from fctune.tasks.sampling.selection import group_by_case, select_pairs, select_rows
from fctune.tasks.suite import Suite
from fctune.tasks.task import Case
from tests.conftest import ROOT

HERMES = FORMATS["hermes"]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOL = Tool({"name": "get_weather", "parameters": SCHEMA})
RIGHT = Call("get_weather", {"city": "Oslo", "days": 2})
NEAR = Call("get_weather", {"city": "Oslo", "days": 3})
FAR = Call("get_news", {"city": "Rome"})


def make_case(name: str, *expected: Call) -> Case:
    question = Message("user", f"Weather {name}?")
    return Case(name, "call" if expected else "no_call", Conversation((question,), (TOOL,), name), expected)


class Script:
    """An engine that says a case's answers in turn, by the number of the sample."""

    def __init__(self, answers: dict[str, Sequence[str]], dies_after: int | None = None, has_tokens: bool = False):
        self.answers, self.dies_after, self.has_tokens = answers, dies_after, has_tokens
        self.asked: list[tuple[str, int]] = []

    def answer(self, prompts: Sequence[Prompt]) -> Iterator[Answer]:
        for index in reversed(range(len(prompts))):
            if self.dies_after is not None and len(self.asked) >= self.dies_after:
                raise KeyboardInterrupt
            name, sample = prompts[index].conversation.source, prompts[index].sample
            self.asked.append((name, sample))
            said = self.answers[name]
            text = said[sample % len(said)]
            ids = (*tuple(map(ord, text)), 0)
            tokens = AnswerTokens((1, 2), ids, (-0.5,) * len(ids)) if self.has_tokens else None
            yield Answer(index, text, num_tokens=len(ids), tokens=tokens)

    def describe(self) -> dict[str, Any]:
        return {"model": "script"}


def render(*calls: Call) -> str:
    return HERMES.render(calls)


SUITE = Suite("weather", (make_case("a", RIGHT), make_case("b", RIGHT), make_case("c")))
ANSWERS = {
    "a": [render(RIGHT), render(NEAR), "<tool_call>{", render(FAR)],
    "b": [render(FAR)],
    "c": ["No, thanks.", "No."],
}


def sample(engine: Script, path: Path, num: int = 4, **options: Any) -> list[dict[str, Any]]:
    rows, _, _ = sample_suite(SUITE, engine, HERMES, ResultsFile(path), num, **options)
    assert rows is not None
    return rows


def test_pass_at_k_is_the_mean_over_all_draws_of_k_answers() -> None:
    for n, right in itertools.product(range(1, 7), range(7)):
        for k in range(1, n + 1):
            if right <= n:
                draws = list(itertools.combinations([True] * right + [False] * (n - right), k))
                assert pass_at_k(n, right, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-12)


def test_the_interval_of_a_pass_rate_covers_the_true_rate() -> None:
    import numpy as np

    generator, covered, num_runs = np.random.default_rng(0), 0, 400
    for _ in range(num_runs):
        # Cases differ in difficulty: the answers to one case are a cluster.
        counts = [(8, int(generator.binomial(8, p))) for p in generator.beta(0.6, 0.4, size=60)]
        found = estimate_pass_rate(counts, 1)
        covered += found["low"] <= 0.6 <= found["high"]
    assert 0.92 <= covered / num_runs <= 0.98


def test_cases_with_fewer_answers_than_k_are_left_out() -> None:
    assert estimate_pass_rate([(4, 2), (1, 1)], 2)["n"] == 1
    assert estimate_pass_rate([(1, 1)], 2)["rate"] is None
    assert choose_ks(1) == [1]
    assert choose_ks(12) == [1, 2, 4, 8, 12]
    equal = estimate_pass_rate([(4, 4)] * 5, 1)
    assert (equal["rate"], equal["high"]) == (1.0, 1.0)
    assert equal["low"] == pytest.approx(0.5655, abs=1e-3)  # of five right cases, not of twenty answers


def test_every_case_is_asked_for_every_sample_and_judged_as_in_an_evaluation(tmp_path: Path) -> None:
    engine = Script(ANSWERS)
    rows = sample(engine, tmp_path / "answers.jsonl")
    assert sorted(engine.asked) == [(name, number) for name in "abc" for number in range(4)]
    verdicts = {name: [row["verdict"] for row in group] for name, group in group_by_case(rows).items()}
    assert verdicts == {
        "a": ["correct", "wrong_arguments", "malformed", "wrong_name"],
        "b": ["wrong_name"] * 4,
        "c": ["correct"] * 4,
    }
    summary = summarise_samples(SUITE, rows, 4, {})
    assert summary["shares"]["all"] == {"always": 1, "sometimes": 1, "never": 1, "unanswered": 0}
    assert [round(one["rate"], 4) for one in summary["pass_rates"]["all"]] == [0.4167, 0.5, 0.6667]
    assert summary["num_missing"] == 0


def test_a_stopped_run_asks_for_the_missing_answers_alone(tmp_path: Path) -> None:
    complete = sample(Script(ANSWERS), tmp_path / "complete.jsonl")
    path = tmp_path / "cut.jsonl"
    first, second = Script(ANSWERS, dies_after=5), Script(ANSWERS)
    with pytest.raises(KeyboardInterrupt):
        sample(first, path)
    assert sample(second, path) == complete
    assert max(Counter(first.asked + second.asked).values()) == 1


def test_another_number_of_answers_does_not_mix_with_earlier_ones(tmp_path: Path) -> None:
    sample(Script(ANSWERS), tmp_path / "answers.jsonl")
    with pytest.raises(ConfigError, match="num_samples: was 4, is now 2"):
        sample(Script(ANSWERS), tmp_path / "answers.jsonl", num=2)


def test_a_budget_ends_the_run_with_equally_many_answers_to_each_case(tmp_path: Path) -> None:
    path, engine = tmp_path / "answers.jsonl", Script(ANSWERS)
    num_tokens = sum(len(ANSWERS[name][0]) + 1 for name in "abc")
    rows = sample(engine, path, budget=Budget(max_tokens=num_tokens))
    assert sorted(engine.asked) == [("a", 0), ("b", 0), ("c", 0)]
    summary = summarise_samples(SUITE, rows, 4, {})
    assert (summary["num_answers"], summary["num_missing"]) == (3, 9)
    again = Script(ANSWERS)  # earlier tokens count, so one answer spends what is left
    assert len(sample(again, path, budget=Budget(max_tokens=num_tokens + 1))) == 4
    assert len(sample(Script(ANSWERS), path)) == 12


def test_the_headline_compares_rates_of_the_same_cases(tmp_path: Path) -> None:
    rows = sample(Script(ANSWERS), tmp_path / "answers.jsonl")
    for kept, shown in ((4, "at least one of 4 answers is right in 66.7%"), (2, "at least one of 2 answers is right")):
        some = [row for row in rows if row["case"] == "a" or row["sample"] < kept]
        page = tmp_path / "page.html"
        write_sample_html({**summarise_samples(SUITE, some, 4, {}), "model": "script"}, SUITE, some, page)
        assert shown in page.read_text()


def test_best_shortest_and_diverse_answers_are_chosen(tmp_path: Path) -> None:
    said = ["No weather today, I am afraid.", "No.", "No.", "No weather today, I am afraid!", "Sorry: ask later."]
    case = SUITE.cases[2]
    engine = Script({**ANSWERS, "c": said})
    answers = group_by_case(sample(engine, tmp_path / "answers.jsonl", num=5))["c"]

    def chosen(keep: Any, num_rows: int) -> list[str]:
        return [row["messages"][-1]["content"] for row in select_rows(case, answers, keep, num_rows)]

    assert chosen("best", 2) == ["No.", "Sorry: ask later."]  # the most frequent, then the shortest
    assert chosen("shortest", 3) == ["No.", "Sorry: ask later.", said[0]]
    diverse = chosen("diverse", 3)
    assert diverse[0] == "No."
    assert not {said[0], said[3]} <= set(diverse)
    assert chosen("best", 9) == ["No.", "Sorry: ask later.", said[0], said[3]]


def test_an_answer_that_was_cut_off_is_not_learned_from(tmp_path: Path) -> None:
    answers = group_by_case(sample(Script(ANSWERS), tmp_path / "answers.jsonl"))["a"]
    cut = [{**answer, "is_cut": True} for answer in answers]
    assert select_rows(SUITE.cases[0], answers)
    assert select_rows(SUITE.cases[0], cut) == []
    assert select_pairs(SUITE.cases[0], cut) == []


def test_only_the_chosen_answer_is_supervised(tmp_path: Path) -> None:
    earlier = (Message("user", "Hi"), Message("assistant", "Hello."), Message("user", "Weather?"))
    case = replace(SUITE.cases[0], prompt=replace(SUITE.cases[0].prompt, messages=earlier, source="a"))
    answers = group_by_case(sample(Script(ANSWERS), tmp_path / "answers.jsonl"))["a"]
    (row,) = select_rows(case, answers, num_rows=4)
    (tmp_path / "sft.jsonl").write_text(json.dumps(row) + "\n")
    (conversation,) = read_source(str(tmp_path / "sft.jsonl"))
    assert isinstance(conversation, Conversation)
    assert [m.weight for m in conversation.messages if m.role == "assistant"] == [0.0, 1.0]
    assert [(call.name, call.arguments) for call in conversation.messages[-1].calls] == [(RIGHT.name, RIGHT.arguments)]


def test_random_rows_ignore_the_verdicts(tmp_path: Path) -> None:
    answers = group_by_case(sample(Script(ANSWERS), tmp_path / "answers.jsonl"))
    assert len(select_rows(SUITE.cases[0], answers["a"], "random", 9)) == 4
    assert len(select_rows(SUITE.cases[1], answers["b"], "random", 9)) == 1
    assert select_rows(SUITE.cases[1], answers["b"], "best", 9) == []


def test_random_pairs_ignore_the_verdicts(tmp_path: Path) -> None:
    answers = group_by_case(sample(Script(ANSWERS), tmp_path / "answers.jsonl", num=8))
    chosen_right = []
    for number in range(40):
        case = replace(SUITE.cases[0], id=f"a{number}")
        pairs = select_pairs(case, [{**answer, "case": case.id} for answer in answers["a"]], "random", 9)
        samples = [pair["metadata"][f"{name}_sample"] for pair in pairs for name in ("chosen", "rejected")]
        assert len(set(samples)) == len(samples), "an answer is in one pair at most"
        assert all(pair["chosen"] != pair["rejected"] for pair in pairs)
        chosen_right += [pair["metadata"]["chosen_sample"] % 4 == 0 for pair in pairs]
    assert 0.15 < sum(chosen_right) / len(chosen_right) < 0.35, "a quarter of all answers is right"
    assert select_pairs(SUITE.cases[1], answers["b"], "random", 9) == []  # always the same answer
    assert len(select_pairs(SUITE.cases[2], answers["c"], "random", 1)) == 1  # always right


def test_pairs_are_right_against_wrong_with_near_misses_first(tmp_path: Path) -> None:
    engine = Script(ANSWERS, has_tokens=True)
    answers = group_by_case(sample(engine, tmp_path / "answers.jsonl"))
    pairs = select_pairs(SUITE.cases[0], answers["a"], num_pairs=9)
    assert [pair["metadata"]["kind"] for pair in pairs] == ["wrong_arguments", "wrong_name", "malformed"]
    assert [pair["metadata"]["rejected_sample"] for pair in pairs] == [1, 3, 2]
    for pair in pairs:
        assert [m["role"] for m in pair["prompt"]] == ["user"]
        assert pair["chosen"][0]["tool_calls"][0]["function"]["name"] == "get_weather"
        assert "".join(map(chr, pair["rejected_token_ids"][:-1])) == pair["metadata"]["rejected_text"]
        read = PairReader().read(UnreadRow("pairs.jsonl", 1, pair))
        assert isinstance(read, Pair)
        assert read.prompt.messages == SUITE.cases[0].prompt.messages
        assert read.rejected.token_ids == tuple(pair["rejected_token_ids"])
    assert pairs[2]["rejected"] == [{"role": "assistant", "content": "<tool_call>{"}]
    assert select_pairs(SUITE.cases[1], answers["b"], num_pairs=9) == []  # never right
    assert select_pairs(SUITE.cases[2], answers["c"], num_pairs=9) == []  # always right


def test_parts_of_a_reward(tmp_path: Path) -> None:
    rows = {(row["case"], row["sample"]): row["scores"] for row in sample(Script(ANSWERS), tmp_path / "answers.jsonl")}
    assert [rows["a", number]["strict"] for number in range(4)] == [1, 0, 0, 0]
    assert [rows["a", number]["arguments"] for number in range(4)] == [1, 0.5, 0, 0]
    assert [rows["a", number]["names"] for number in range(4)] == [1, 1, 0, 0]
    assert [rows["a", number]["format"] for number in range(4)] == [1, 1, 0, 1]
    assert rows["c", 1]["brevity"] == 1 - 4 / 256
    assert weigh_parts(rows["a", 1], {"strict": 1.0, "arguments": 0.5}) == 0.25


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"strct": 1.0}, r"--reward.strct: no such part of a reward; did you mean .*strict"),
        ({"strict": "high"}, "--reward.strict=high: expected a number"),
        ({"strict": 0}, "no part has a weight other than 0"),
    ],
    ids=["unknown", "not_a_number", "nothing"],
)
def test_a_wrong_reward_is_refused(weights: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_reward(weights, "--reward")


_RUN = """
import json, sys, time
from pathlib import Path
from fctune.tasks.evaluation.results import ResultsFile
from fctune.tasks.sampling.run import sample_suite
from tests.tasks.sampling.test_sampled_answers import ANSWERS, HERMES, SUITE, Script

class Slow(Script):
    def answer(self, prompts):
        for answer in super().answer(prompts):
            time.sleep(0.02)
            yield answer

engine = Slow(ANSWERS)
sample_suite(SUITE, engine, HERMES, ResultsFile(Path(sys.argv[1])), 8)
"""


@pytest.mark.slow
def test_a_run_killed_at_random_counts_no_answer_twice(tmp_path: Path) -> None:
    complete = sample(Script(ANSWERS), tmp_path / "complete.jsonl", num=8)
    path, rng, num_kills = tmp_path / "killed.jsonl", random.Random(0), 0

    def count_lines() -> int:
        return path.read_bytes().count(b"\n") if path.exists() else 0

    while True:
        target = count_lines() + rng.randint(1, 7)
        process = subprocess.Popen([sys.executable, "-c", _RUN, str(path)], cwd=ROOT)
        while process.poll() is None and count_lines() < target:
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        if process.wait() != -signal.SIGKILL:
            break
        num_kills += 1
        written = read_rows(path, is_partial=True)
        assert len(written) == len({row["id"] for row in written})
        with path.open("ab") as file:  # as if the kill had cut a line
            file.write(b'{"id": "a#')
    assert process.returncode == 0
    assert num_kills >= 3
    assert read_rows(path) == complete
