"""What a model in this process computes: long prompts in several passes, only what the last prompt of a conversation
lacked, and no answers that have ended.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from fctune.calls.response_template import find_call_format
from fctune.data.conversation import Conversation, Message
from fctune.engines.engine import Answer, Prompt, Sampling
from fctune.engines.local import LocalEngine
from fctune.models.transformers import prefix_cache
from fctune.models.transformers.likelihood import score_continuations
from fctune.tasks.episode import Episode, EpisodeLimits, EpisodeRunner
from fctune.tasks.task import Step, Task, TaskState
from tests.conftest import TINY_BASE
from tests.models.dense_samples import FAMILIES, read_raw
from tests.models.hybrid_samples import HYBRIDS, make_config

VOCABULARY = json.loads((TINY_BASE / "config.json").read_text())["vocab_size"]
# Its keys depend on the length of the prompt.
LONG_ROPE = "phi3"


@functools.lru_cache(maxsize=2)
def make_policy(kind: str) -> Any:
    """Return a random model of a family in float64, with the vocabulary of the tiny base.

    Padding is NaN in Gemma 2's attention in float64, as its mask has values that float32 does not.
    """
    torch.manual_seed(0)
    dtype = torch.float32 if kind == "gemma2" else torch.float64
    if kind not in HYBRIDS:
        changes = {"vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY, "max_position_embeddings": 2048}
        config = CONFIG_MAPPING[kind].from_dict(read_raw(kind, **changes))
    else:
        config = make_config(kind, vocab_size=VOCABULARY)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, experts_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    return model


def draw(*lengths: int, seed: int = 0) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()) for length in lengths]


def to_prompts(prompts: Sequence[Sequence[int]], is_continued: bool = False) -> list[Prompt]:
    """Return prompts that are given as token ids, for answers of up to 12 tokens."""
    return [Prompt(Conversation(()), 12, ids=tuple(ids), seed=len(ids), is_continued=is_continued) for ids in prompts]


def ask(engine: LocalEngine, prompts: Sequence[Sequence[int]], *, is_continued: bool = False) -> list[Answer]:
    """Return the answers to prompts that are given as token ids, in their order."""
    answers = sorted(engine.answer(to_prompts(prompts, is_continued)), key=lambda answer: answer.index)
    assert all(answer.error is None for answer in answers)
    return answers


def list_ids(answers: Sequence[Answer]) -> list[tuple[int, ...]]:
    return [answer.tokens.ids for answer in answers if answer.tokens is not None]


def check_equal(answers: Sequence[Answer], expected: Sequence[Answer]) -> None:
    """Check that answers have the same tokens, with the same log-probabilities."""
    assert list_ids(answers) == list_ids(expected)
    for one, other in zip(answers, expected, strict=True):
        assert one.tokens is not None
        assert other.tokens is not None
        assert one.tokens.logprobs == pytest.approx(other.tokens.logprobs, abs=1e-5)


@dataclass
class Passes:
    """Shapes of the token ids that a model has read, in the order of its forward passes."""

    shapes: list[tuple[int, int]] = field(default_factory=list)

    def count_prompt_tokens(self) -> int:
        """Return the tokens of all passes but those of one token a row, which generate."""
        return sum(rows * width for rows, width in self.shapes if width > 1)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Passes]:
    """Return a function that records the forward passes of a model from now on."""

    def start(model: Any) -> Passes:
        passes, forward = Passes(), type(model).forward

        def watched(self: Any, input_ids: Any = None, **options: Any) -> Any:
            passes.shapes.append(tuple(input_ids.shape))
            return forward(self, input_ids=input_ids, **options)

        functools.update_wrapper(watched, forward)
        monkeypatch.setattr(type(model), "forward", watched)
        return passes

    return start


@pytest.fixture
def short_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read prompts in passes of 5 tokens a row."""
    monkeypatch.setattr(prefix_cache, "_MAX_PAIRS", 1)
    monkeypatch.setattr(prefix_cache, "_MIN_CHUNK", 5)


@pytest.mark.sample(5)
@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind != LONG_ROPE])
def test_a_prompt_read_in_parts_is_answered_as_one_read_at_once(
    kind: str, watch: Callable[[Any], Passes], request: pytest.FixtureRequest
) -> None:
    engine = LocalEngine(TINY_BASE, model=make_policy(kind), keeps_tokens=True)
    prompts = draw(41, 23, 30)
    at_once = ask(engine, prompts)
    request.getfixturevalue("short_passes")
    passes = watch(engine.model)
    check_equal(ask(engine, prompts), at_once)
    assert passes.shapes[:9] == [(3, 5)] * 8 + [(3, 1)]


@pytest.mark.parametrize("kind", ["qwen3_5_text", "lfm2", "bamba", "minimax", LONG_ROPE])
def test_a_model_whose_state_depends_on_the_passes_reads_a_prompt_at_once_and_keeps_nothing(
    kind: str, watch: Callable[[Any], Passes], short_passes: None
) -> None:
    engine = LocalEngine(TINY_BASE, model=make_policy(kind), keeps_tokens=True)
    passes = watch(engine.model)
    for prompts in (draw(41, 23), draw(45, 30)):
        passes.shapes.clear()
        ask(engine, prompts, is_continued=True)
        assert passes.shapes[0] == (2, max(map(len, prompts)))
        assert {width for _, width in passes.shapes[1:]} <= {1}


@pytest.mark.parametrize("option", [{"use_cache": False}, {"cache_implementation": "static"}])
def test_the_cache_that_a_generation_config_asks_for_changes_no_answer(
    option: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    model, prompts = make_policy("qwen3"), draw(41, 23)
    engine = LocalEngine(TINY_BASE, model=model, keeps_tokens=True)
    expected = ask(engine, prompts)
    with patch.multiple(model.generation_config, **option):
        check_equal(ask(engine, prompts, is_continued=True), expected)
        longer = [one + ids for one, ids in zip(prompts, list_ids(expected), strict=True)]
        continued = ask(engine, longer, is_continued=True)
        request.getfixturevalue("short_passes")
        check_equal(ask(engine, prompts), expected)
    check_equal(ask(engine, longer), continued)


@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind != LONG_ROPE])
def test_answers_that_have_ended_leave_the_batch_and_change_no_other(kind: str, watch: Callable[[Any], Passes]) -> None:
    engine = LocalEngine(TINY_BASE, model=make_policy(kind), keeps_tokens=True, sampling=Sampling(50.0))
    engine.stop_ids = frozenset(range(0, VOCABULARY, 4))  # which a random model draws every fourth time
    prompts = draw(*range(9, 29))
    alone = [ask(engine, [prompt])[0] for prompt in prompts]
    passes = watch(engine.model)
    check_equal(ask(engine, prompts), alone)
    lengths = list(map(len, list_ids(alone)))
    assert [rows for rows, width in passes.shapes if width == 1] == list_sizes(lengths)
    assert list_sizes(lengths)[-1] <= 5
    passes.shapes.clear()
    known = {answer.index: len(passes.shapes) for answer in engine.answer(to_prompts(prompts))}
    half = sorted(lengths)[len(lengths) // 2 - 1]
    assert all(known[index] == half for index, length in enumerate(lengths) if length <= half), "before the others"


def list_sizes(lengths: Sequence[int]) -> list[int]:
    """Return the rows of each pass after the first, if those that have ended leave once they are half."""
    sizes, batch = [], list(lengths)
    for num_tokens in range(1, max(lengths)):
        if 2 * sum(length <= num_tokens for length in batch) >= len(batch):
            batch = [length for length in batch if length > num_tokens]
        sizes.append(len(batch))
    return sizes


class LargestTensor(TorchDispatchMode):
    """Records the number of values in the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(one.numel() for one in tree_leaves(made) if isinstance(one, torch.Tensor))])
        return made


@pytest.mark.parametrize("is_continued", [False, True])
def test_no_tensor_of_a_long_prompt_grows_with_the_square_of_its_length(
    is_continued: bool, make_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With attention that holds the scores of all heads."""
    model = AutoModelForCausalLM.from_pretrained(make_model("llama"), attn_implementation="eager").eval()
    monkeypatch.setattr(prefix_cache, "_MAX_PAIRS", 2**16)
    engine, num_heads, found = LocalEngine(TINY_BASE, model=model), 4, list[float]()
    for length in (512, 1024):
        prompt = Prompt(Conversation(()), 1, ids=draw(length)[0], seed=0, is_continued=is_continued)
        with LargestTensor() as largest:
            next(engine.answer([prompt]))
        found.append(largest.numel / num_heads)
    assert found[0] <= 2**16
    assert found[1] <= prefix_cache._MIN_CHUNK * 1024
    monkeypatch.setattr(prefix_cache, "_MAX_PAIRS", 2**30)
    with LargestTensor() as largest:
        next(engine.answer([replace(prompt, is_continued=False)]))
    assert largest.numel / num_heads == 1024**2


def test_a_prompt_of_64k_tokens_is_read_512_at_a_time() -> None:
    assert [prefix_cache.choose_chunk(rows, 65_536) for rows in (1, 2, 64)] == [512, 256, 128]
    assert prefix_cache.choose_chunk(64, 512) >= 512, "short prompts are read at once"


@pytest.mark.sample(5)
@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind != LONG_ROPE])
def test_the_next_prompts_of_conversations_read_only_what_follows_and_are_answered_as_if_all_was_read(
    kind: str, watch: Callable[[Any], Passes]
) -> None:
    """One prompt leaves out the end of the last answer, as a template may that does not print its reasoning."""
    model = make_policy(kind)
    engine = LocalEngine(TINY_BASE, model=model, keeps_tokens=True)
    other = LocalEngine(TINY_BASE, model=model, keeps_tokens=True, reuses_prefixes=False)
    passes, prompts, known = watch(model), draw(41, 23, 30), [0, 0, 0]
    for turn in range(3):
        expected = ask(other, prompts, is_continued=True)
        passes.shapes.clear()
        answered = ask(engine, prompts, is_continued=True)
        check_equal(answered, expected)
        if turn:
            # A conversation's last token was not read when it was generated, and that of a prompt generates.
            lacked = [len(prompt) - num - 1 for prompt, num in zip(prompts, known, strict=True)]
            assert passes.count_prompt_tokens() == sum(num for num in lacked if num > 1)
            assert sum(lacked) < 35 < sum(map(len, prompts)) / 2
        first, second, third = list_ids(answered)
        shortened = first, second[:-4], third
        known = [len(prompt) + len(ids) - 1 for prompt, ids in zip(prompts, [first, second[:-3], third], strict=True)]
        added = draw(9, 5, 12, seed=turn + 1)
        prompts = [prompt + ids + new for prompt, ids, new in zip(prompts, shortened, added, strict=True)]


@dataclass(frozen=True)
class Talk(Task):
    """A conversation whose user says one sentence after another, whatever the model answers."""

    id: str
    sentences: tuple[str, ...]
    category: str = "talk"

    def start(self) -> TaskState:
        return _TalkState(self)


class _TalkState(TaskState):
    is_dialogue = True

    def __init__(self, talk: Talk):
        first, *self._rest = talk.sentences
        super().__init__(Conversation((Message("user", first),), source=talk.id))

    def respond(self, step: Step) -> Sequence[Message]:
        return [Message("user", self._rest.pop(0))] if self._rest else ()


def test_the_turns_of_an_episode_read_each_token_once(watch: Callable[[Any], Passes]) -> None:
    """Through the runner, the chat template and a real tokenizer; conversations end at different times."""
    sentences = ("Say kalo menu.", "And the weather in Oslo?", "Book a table for two at eight, please.", "Thanks.")
    talks = [Talk(f"talk {n}", (f"Hello {n}. " * 8, *sentences[: n % 4 + 1])) for n in range(6)]
    found, prompts = {}, []
    for reuses in (True, False):
        engine = LocalEngine(TINY_BASE, reuses_prefixes=reuses)
        passes = watch(engine.model)
        runner = EpisodeRunner(engine, find_call_format(engine.template), EpisodeLimits(24))
        done = sorted(runner.run(map(Episode, talks), num_at_once=4), key=lambda episode: episode.task.id)
        assert all(episode.error is None for episode in done)
        found[reuses] = [[step.answer.text for step in episode.steps] for episode in done], passes.count_prompt_tokens()
        prompts = [len(engine.template.encode_prompt(replace(one.conversation, messages=one.messages))) for one in done]
    assert found[True][0] == found[False][0]
    assert [len(texts) for texts in found[True][0]] == [len(talk.sentences) for talk in talks]
    # Each token of a conversation is read once, and without padding; answers that were generated are not read.
    assert found[True][1] < sum(prompts)
    assert found[False][1] > 2 * found[True][1]


def test_equal_prompts_of_a_batch_are_read_once_and_sampled_apart(watch: Callable[[Any], Passes]) -> None:
    engine = LocalEngine(TINY_BASE, sampling=Sampling(1.5), keeps_tokens=True)
    passes = watch(engine.model)
    (ids,) = draw(40)
    asked = [Prompt(Conversation(()), 8, ids=ids, seed=seed, is_continued=True) for seed in range(4)]
    assert len(set(list_ids(list(engine.answer(asked))))) > 1
    assert passes.shapes[:2] == [(1, 39), (4, 1)]


def test_a_batch_takes_nothing_from_the_conversations_of_another(watch: Callable[[Any], Passes]) -> None:
    """That begin with the same system prompt."""
    engine = LocalEngine(TINY_BASE, batch_size=1, keeps_tokens=True)
    common, *own = draw(30, 12, 9, 5)
    prompts, passes = [common + one for one in own], watch(engine.model)
    for turn in range(3):
        passes.shapes.clear()
        answers = list_ids(ask(engine, prompts, is_continued=True))
        if turn:
            assert passes.count_prompt_tokens() == 3 * 8, "the last token of an answer, and 7 of the 8 that follow it"
        else:
            assert passes.count_prompt_tokens() == sum(map(len, prompts)) - 3 - 2 * len(common)
        prompts = [prompt + ids + new for prompt, ids, new in zip(prompts, answers, draw(8, 8, 8), strict=True)]


def test_what_is_kept_is_bounded_and_dropped_with_its_conversation_and_its_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = LocalEngine(TINY_BASE)
    kept = engine._prefixes
    assert kept is not None
    ask(engine, draw(30, 30, 30), is_continued=True)
    size = kept._kept[0].num_bytes
    assert len(kept) == 3
    assert size == 2 * engine.model.config.num_hidden_layers * kept._kept[0].layers[0][0].numel() * 4
    monkeypatch.setattr(kept, "_max_bytes", int(1.5 * size))
    ask(engine, draw(30, 30, 30, seed=1), is_continued=True)
    assert len(kept) == 1, "the others had no room"
    ask(engine, draw(20))
    assert not kept, "of no conversation that goes on"
    ask(engine, draw(30), is_continued=True)
    engine.publish(engine.model, 1)
    assert engine._prefixes is not None
    assert not engine._prefixes


def test_what_is_kept_gives_way_when_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = LocalEngine(TINY_BASE, batch_size=2, keeps_tokens=True)
    prompts = draw(30, 25, 20)
    first = list_ids(ask(engine, prompts, is_continued=True))
    prompts = [prompt + ids for prompt, ids in zip(prompts, first, strict=True)]
    expected = ask(LocalEngine(TINY_BASE, keeps_tokens=True), prompts)
    generate, left = engine.model.generate, [True]

    def short_of_memory(**options: Any) -> torch.Tensor:
        if left.pop() if left else False:
            raise torch.OutOfMemoryError("no memory")
        return generate(**options)

    monkeypatch.setattr(engine.model, "generate", short_of_memory)
    check_equal(ask(engine, prompts, is_continued=True), expected)
    assert engine.batch_size == 2


@pytest.mark.parametrize("kind", ["gemma3_text", "qwen3"])
def test_choices_after_a_long_prompt_are_scored_as_in_one_pass(
    kind: str, request: pytest.FixtureRequest, watch: Callable[[Any], Passes]
) -> None:
    model, (ids, *choices) = make_policy(kind), draw(33, 4, 7)
    at_once = score_continuations(model, ids, choices)
    request.getfixturevalue("short_passes")
    passes = watch(model)
    for one, other in zip(score_continuations(model, ids, choices), at_once, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
    assert [width for _, width in passes.shapes] == [5] * 6 + [2, 4, 7]
