"""Tasks made from cases: one answer each, rewarded by the verdict on its calls."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fctune.base.errors import ConfigError, DataError
from fctune.calls.formats.base import CallFormat
from fctune.checkpoint.fault_hooks import fire
from fctune.config.intervals import choose_noun, format_count
from fctune.engines.decoding import AnswerDecoder
from fctune.engines.engine import Answer, AnswerTokens
from fctune.tasks.evaluation.cases import Suite, make_cases
from fctune.tasks.evaluation.judging import judge_answer
from fctune.tasks.evaluation.row_cases import make_row_cases
from fctune.tasks.evaluation.suites import benchmark_of, load_suite
from fctune.tasks.sampling.rewards import BINARY, REWARD_PARTS, check_reward, score_answer, weigh_parts
from fctune.tasks.sampling.rollouts import Generation, Request, Rollout, RolloutEngine


class CaseTasks:
    """The single-turn cases of a suite.

    Args:
        suite: The cases.
        decoder: Decodes answers of the policy's chat template.
        call_format: Format in which it writes calls.
        max_new_tokens: Maximum length of an answer in tokens.
        max_tokens: Tokens that a prompt and its answer may have together.
        weights: Weight of each part of ``REWARD_PARTS``.
        where: Config section of the settings, for messages.

    Raises:
        ConfigError: A part of the reward does not exist, or a prompt leaves no room for an answer.
        DataError: The suite has no single-turn case, or the chat template refuses one.
    """

    def __init__(
        self,
        suite: Suite,
        decoder: AnswerDecoder,
        call_format: CallFormat,
        max_new_tokens: int,
        max_tokens: int,
        weights: Mapping[str, float] = BINARY,
        where: str = "grpo",
    ):
        check_reward(weights, f"{where}.reward")
        if not suite.cases:
            raise DataError(
                f"{suite.name}: has no single-turn cases. Make some with fctune data cases ROWS --out FILE."
            )
        self._cases = {case.id: case for case in suite.cases}
        self._prompts = {case.id: tuple(decoder.template.encode_prompt(case.prompt)) for case in suite.cases}
        longest = max(self._prompts, key=lambda case_id: len(self._prompts[case_id]))
        if (num_tokens := len(self._prompts[longest])) + max_new_tokens > max_tokens:
            num_long = sum(len(ids) + max_new_tokens > max_tokens for ids in self._prompts.values())
            raise ConfigError(
                f"{where}.cases: {num_long:,} of {format_count(len(self._prompts), 'case')} "
                f"{choose_noun(num_long, 'leaves', 'leave')} no room for an answer, such as {longest} "
                f"with {num_tokens:,} tokens and {where}.max_new_tokens={max_new_tokens:,} in "
                f"data.seq_len={max_tokens:,}. Raise data.seq_len, lower {where}.max_new_tokens, or remove these cases."
            )
        self._decoder, self._call_format = decoder, call_format
        self._max_new_tokens, self._weights = max_new_tokens, dict(weights)
        settings = [suite.digest(), call_format.name, max_new_tokens, sorted(self._weights.items())]
        self._digest = hashlib.blake2b(
            json.dumps([settings, sorted(self._prompts.items())]).encode("utf-8", "surrogatepass"), digest_size=8
        ).hexdigest()

    @property
    def ids(self) -> Sequence[str]:
        """Ids of the cases."""
        return list(self._cases)

    @property
    def categories(self) -> Mapping[str, str]:
        """Category of each case, by its id."""
        return {case.id: case.category for case in self._cases.values()}

    def digest(self) -> str:
        """Return a hex digest of the cases, their prompts' tokens and the reward."""
        return self._digest

    def play(self, engine: RolloutEngine, requests: Sequence[Request]) -> Iterator[Rollout]:
        """Yield the rewarded answer to each request."""
        prompts = [self._prompts[request.case_id] for request in requests]
        seeds = [request.seed for request in requests]
        for generation in engine.generate(prompts, seeds, [self._max_new_tokens] * len(requests)):
            yield self._judge(requests[generation.index], generation)

    def _judge(self, request: Request, generation: Generation) -> Rollout:
        fire("judge", request.case_id)
        started = time.perf_counter()
        case, prompt = self._cases[request.case_id], self._prompts[request.case_id]
        if generation.error is None:
            tokens = AnswerTokens(prompt, generation.ids, generation.logprobs)
            answer = replace(self._decoder.decode(generation.index, tokens, has_tokens=False), is_cut=generation.is_cut)
        else:
            answer = Answer(generation.index, error=generation.error)
        parts = dict.fromkeys(REWARD_PARTS, 0.0)
        if answer.error is None:
            parts = score_answer(judge_answer(case, answer, self._call_format), self._max_new_tokens)
        return Rollout(
            request.case_id,
            request.sample,
            case.category,
            generation.version,
            prompt,
            generation.ids,
            (True,) * len(generation.ids),
            generation.logprobs,
            is_cut=answer.is_cut,
            reward=weigh_parts(parts, self._weights),
            parts=parts,
            text=answer.text,
            error=answer.error,
            judging_s=time.perf_counter() - started,
            rejected=generation.rejected,
        )


def load_training_suite(path: str, is_forced: bool = False) -> Suite:
    """Load training cases: those of a suite's file, or the last turns of synthetic rows.

    Args:
        path: JSONL file of cases, suite in YAML, or ``synthetic:SPLIT:ROWS[:SEED]``.
        is_forced: Accept the cases of a benchmark.

    Raises:
        ConfigError: The cases belong to a benchmark, and ``is_forced`` is False.
        DataError: The cases cannot be read, or have no expected answers.
    """
    if path.startswith("synthetic:"):
        rows = [case.row for case in make_row_cases([path]).cases]
        named = ((f"{path}: case {number}", number, row) for number, row in enumerate(rows, start=1))
        suite = Suite("synthetic", tuple(make_cases(Path(path), named)))
    else:
        suite = load_suite(path)
    if (benchmark := benchmark_of(suite)) is not None and not is_forced:
        raise ConfigError(
            f"grpo.cases={path}: belongs to a benchmark ({benchmark}), which cannot measure a model that has learned "
            "from it. Use other cases, or set grpo.force_benchmark=true; every output of the run then says so."
        )
    return suite
