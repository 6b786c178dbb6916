"""Generation in this process: greedy and sampled, in batches of any size, and prompts without an answer."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fctune.base.errors import ConfigError, DataError
from fctune.data.chat_template import ChatTemplate
from fctune.data.conversation import Conversation, Message
from fctune.data.synthetic import iter_cases
from fctune.engines import local
from fctune.engines.engine import Prompt, Sampling, make_prompts
from fctune.engines.local import GumbelNoise, LocalEngine
from fctune.engines.model_files import find_model
from fctune.models.hub import digest_model


@pytest.fixture(scope="module")
def prompts() -> list[Conversation]:
    return [Conversation(case.messages, case.tools, case.id) for case in iter_cases(6, 3)]


def texts(engine: LocalEngine, prompts: list[Conversation], max_new_tokens: int = 16) -> list[str]:
    answers = engine.answer(make_prompts(prompts, max_new_tokens))
    return [answer.text for answer in sorted(answers, key=lambda answer: answer.index)]


def test_batched_answers_equal_those_one_at_a_time(tiny_base: Path, prompts: list[Conversation]) -> None:
    together = texts(LocalEngine(tiny_base, batch_size=6), prompts, 24)
    assert together == texts(LocalEngine(tiny_base, batch_size=1), prompts, 24)


def test_a_dtype_that_is_emulated_is_read_as_float32_where_memory_permits(
    tiny_base: Path, prompts: list[Conversation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    for name, dtype in (("half", torch.bfloat16), ("same", torch.float32)):
        shutil.copytree(tiny_base, tmp_path / name)
        rounded = AutoModelForCausalLM.from_pretrained(tiny_base, dtype=torch.bfloat16)
        rounded.to(dtype).save_pretrained(tmp_path / name)
    monkeypatch.setattr(local, "is_emulated", lambda dtype: dtype is torch.bfloat16)
    engine = LocalEngine(tmp_path / "half")
    assert engine.model.dtype is torch.float32
    assert texts(engine, prompts) == texts(LocalEngine(tmp_path / "same"), prompts)
    monkeypatch.setattr(local, "total_memory", lambda device, ranks: 1_000_000)
    assert LocalEngine(tmp_path / "half").model.dtype is torch.bfloat16


def test_an_answer_is_the_greedy_continuation_of_the_prompt(tiny_base: Path) -> None:
    from transformers import AutoModelForCausalLM

    prompt = Conversation((Message("user", "Say kalo menu."),))
    answer = next(iter(LocalEngine(tiny_base).answer([Prompt(prompt, 12)])))
    template = ChatTemplate(tiny_base)
    model = AutoModelForCausalLM.from_pretrained(tiny_base).eval()
    tokens = template.encode_prompt(prompt)
    generated: list[int] = []
    with torch.no_grad():
        while len(generated) < 12:
            token = int(model(torch.tensor([tokens + generated])).logits[0, -1].argmax())
            if token in template.stop_ids:
                break
            generated.append(token)
    assert answer.text == template.tokenizer.decode(generated)
    assert answer.is_cut == (len(generated) == 12)


def test_samples_depend_on_the_seed_and_the_prompt_alone(tiny_base: Path, prompts: list[Conversation]) -> None:
    def sampled(batch_size: int, seed: int, prompts: list[Conversation]) -> list[str]:
        return texts(LocalEngine(tiny_base, batch_size=batch_size, sampling=Sampling(2.0, seed)), prompts)

    first = sampled(6, 1, prompts)
    assert first == sampled(1, 1, prompts)
    assert first[3:] == sampled(6, 1, prompts[3:])
    assert first != sampled(6, 2, prompts)
    assert first != texts(LocalEngine(tiny_base), prompts)


def test_tokens_are_sampled_with_their_probabilities(tiny_base: Path) -> None:
    """The largest logit after Gumbel noise is a sample from the softmax: compared with the probabilities."""
    temperature, num_draws = 1.5, 400
    greedy = LocalEngine(tiny_base)
    tokens = greedy.template.encode_prompt(Conversation((Message("user", "Say kalo menu."),)))
    with torch.no_grad():
        logits = greedy.model(torch.tensor([tokens])).logits[0, -1].double()
    probabilities = (logits / temperature).softmax(-1)
    draws: Counter[int] = Counter()
    noise = GumbelNoise(temperature, list(range(num_draws)))
    draws.update(noise(torch.empty(0), logits.expand(num_draws, -1)).argmax(-1).tolist())
    for token in probabilities.topk(3).indices.tolist():
        expected = float(probabilities[token]) * num_draws
        assert abs(draws[token] - expected) < 4 * max(1.0, expected * (1 - expected / num_draws)) ** 0.5


def test_a_batch_that_runs_out_of_memory_is_halved(
    tiny_base: Path, prompts: list[Conversation], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = LocalEngine(tiny_base, batch_size=6)
    expected_texts = texts(engine, prompts)
    generate, sizes = engine.model.generate, []

    def short_of_memory(input_ids: torch.Tensor, **options: Any) -> torch.Tensor:
        sizes.append(len(input_ids))
        if len(input_ids) > 2:
            raise torch.OutOfMemoryError("no memory")
        return generate(input_ids=input_ids, **options)

    monkeypatch.setattr(engine.model, "generate", short_of_memory)
    assert texts(engine, prompts) == expected_texts
    assert sizes == [6, 3, 1, 1, 1, 1, 1, 1]


def test_a_prompt_without_an_answer_spares_the_others(make_model: Callable[..., Path]) -> None:
    engine = LocalEngine(make_model("llama", max_position_embeddings=64))
    prompts = [Conversation((Message("user", words),)) for words in ("Hi", "kalo " * 100, "Hello")]
    answers = sorted(engine.answer(make_prompts(prompts, 16)), key=lambda answer: answer.index)
    assert [answer.error is None for answer in answers] == [True, False, True]
    assert "exceed the model's 64 positions" in (answers[1].error or "")
    with pytest.raises(DataError, match="none of 1 prompt can be answered"):
        list(engine.answer(make_prompts(prompts[1:2], 16)))


def test_a_model_is_found_by_the_names_that_users_give(tmp_path: Path, tiny_base: Path) -> None:
    run = tmp_path / "run"
    (run / "export").mkdir(parents=True)
    (run / "run.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"no export/merged.*was killed"):
        find_model(str(run))
    (run / "exit.json").write_text('{"code": 1, "reason": "loss is NaN"}')
    with pytest.raises(ConfigError, match="ended with: loss is NaN"):
        find_model(str(run))
    for step in (9, 10):
        (run / "checkpoints" / f"elastic-checkpoint-{step}").mkdir(parents=True)
    (run / "checkpoints" / "checkpoint-12").mkdir()
    for name in (run, run / "checkpoints" / "checkpoint-12"):
        with pytest.raises(ConfigError, match=r"Pass .*/elastic-checkpoint-10, the newest"):
            find_model(str(name))
    adapter = run / "export" / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tiny_base)}))
    for name in (run, adapter):
        assert find_model(str(name)) == (tiny_base, adapter)
    shutil.copytree(tiny_base, run / "export" / "merged")
    assert find_model(str(run)) == (run / "export" / "merged", None)
    assert find_model(str(tiny_base), str(adapter)) == (tiny_base, adapter)
    (tmp_path / "tune.json").write_text("{}")
    assert find_model(str(tmp_path)) == (run / "export" / "merged", None), "the directory of a tune"
    shutil.rmtree(run)
    with pytest.raises(ConfigError, match="the tune has not trained its model yet"):
        find_model(str(tmp_path))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            '{"base_model_name_or_path": "./no/base"}',
            r"\./no/base does not exist .*Set base_model_name_or_path",
        ),
        ('{"base_model_name_or_path": null}', "names no base model"),
        ("[]", "names no base model"),
        ("{", "names no base model"),
    ],
)
def test_an_adapter_without_its_base_is_a_config_error(config: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(config)
    with pytest.raises(ConfigError, match=words):
        find_model(str(tmp_path))


def test_anything_but_a_model_is_a_config_error(tmp_path: Path, tiny_base: Path) -> None:
    for name, adapter in (("no/such", None), (str(tmp_path), None), (str(tiny_base), str(tmp_path))):
        with pytest.raises(ConfigError):
            find_model(name, adapter)


def test_a_copy_has_the_same_digest_and_another_model_has_not(tmp_path: Path) -> None:
    size = 40 * 1024**2
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        data = bytearray(size)
        if name == "c":  # a trained tensor of 1 MiB in the middle
            data[size // 2 : size // 2 + 1024**2] = b"x" * 1024**2
        (tmp_path / name / "model.safetensors").write_bytes(data)
    digests = [digest_model(tmp_path / name) for name in ("a", "b", "c")]
    assert digests[0] == digests[1] != digests[2]
    template = tmp_path / "b" / "additional_chat_templates" / "tool_use.jinja"
    template.parent.mkdir()
    template.write_text("{{ tools }}")
    assert digest_model(tmp_path / "b") != digests[0]


def test_samples_of_a_prompt_differ_and_their_tokens_have_the_model_s_logprobs(
    tiny_base: Path, prompts: list[Conversation]
) -> None:
    from transformers import AutoModelForCausalLM

    engine = LocalEngine(tiny_base, batch_size=3, sampling=Sampling(2.0, 5), keeps_tokens=True)
    asked = make_prompts([prompts[0]] * 3 + [prompts[1]], 12, [0, 1, 2, 0])
    answers = sorted(engine.answer(asked), key=lambda answer: answer.index)
    assert len({answer.text for answer in answers[:3]}) == 3
    # Sample 0 is the answer of an evaluation, and none depends on the others of its batch.
    assert answers[0].text == texts(LocalEngine(tiny_base, sampling=Sampling(2.0, 5)), [prompts[0]], 12)[0]
    alone = next(iter(LocalEngine(tiny_base, sampling=Sampling(2.0, 5)).answer([Prompt(prompts[0], 12, 2)])))
    assert alone.text == answers[2].text
    model = AutoModelForCausalLM.from_pretrained(tiny_base).eval()
    for answer in answers:
        assert answer.tokens is not None
        prompt, ids = answer.tokens.prompt_ids, answer.tokens.ids
        assert answer.num_tokens == len(ids)
        assert list(prompt) == engine.template.encode_prompt(prompts[0 if answer.index < 3 else 1])
        assert engine.template.decode([i for i in ids if i not in engine.template.stop_ids]) == answer.text
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1)[torch.arange(len(ids)), torch.tensor(ids)]
        assert torch.tensor(answer.tokens.logprobs) == pytest.approx(expected, abs=2e-4)
