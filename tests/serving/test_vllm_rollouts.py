"""Rollouts through a real vLLM: versions published while it runs, with the log-probabilities of the trainer's model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from fctune.base.errors import ConfigError
from fctune.data.chat_template import ChatTemplate
from fctune.engines.policy_server import PolicyServer, PublishedAdapter, ServerPatience
from tests.conftest import TINY_BASE
from tests.engines.continuations import Continuation, compute_logprobs, continue_ids
from tests.ranks import find_port
from tests.serving.servers import serve_vllm

pytestmark = pytest.mark.serving

RANK = 8
MAX_NEW_TOKENS = 24


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return ChatTemplate(TINY_BASE)


@pytest.fixture(scope="module")
def make_adapter(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    def make(seed: int, rank: int = RANK) -> Path:
        path = tmp_path_factory.mktemp("adapter") / f"{seed}-{rank}"
        torch.manual_seed(seed)
        base = AutoModelForCausalLM.from_pretrained(TINY_BASE)
        modules = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
        model = get_peft_model(base, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=modules))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.02)
        model.save_pretrained(str(path))
        return path

    return make


@pytest.fixture(scope="module")
def prompts(template: ChatTemplate) -> list[list[int]]:
    texts = ("Add 2 and 3.", "Where is Bergen?", "Write a letter to Anna.", "Is it cold?")
    return [template.tokenizer.encode(text, add_special_tokens=True) for text in texts for _ in range(4)]


@pytest.fixture(scope="module")
def port() -> int:
    return find_port()


@pytest.fixture(scope="module")
def address(vllm_python: str, port: int) -> Iterator[str]:
    with serve_vllm(TINY_BASE, vllm_python, port, "--max-model-len", "512", adapters=RANK) as address:
        yield address


def ask(engine: PolicyServer, prompts: list[list[int]]) -> list[Continuation]:
    return continue_ids(engine, prompts, range(len(prompts)), MAX_NEW_TOKENS)


def measure_ratios(adapter: Path | None, prompts: list[list[int]], answers: list[Continuation]) -> torch.Tensor:
    """Return the importance ratios of all generated tokens, of a trainer's float32 model over the server."""
    model = AutoModelForCausalLM.from_pretrained(TINY_BASE)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    ratios = []
    for prompt, answer in zip(prompts, answers, strict=True):
        own = compute_logprobs(model.eval(), prompt, answer.ids)
        ratios.append((own - torch.tensor(answer.logprobs)).exp())
    return torch.cat(ratios)


def test_published_versions_answer_with_the_trainers_probabilities(
    address: str, template: ChatTemplate, make_adapter: Callable[..., Path], prompts: list[list[int]], tmp_path: Path
) -> None:
    engine = PolicyServer(address, tmp_path, template, min_positions=512)
    answered = []
    for version, adapter in ((0, None), (1, make_adapter(1)), (2, make_adapter(2))):
        if adapter is not None:
            engine.publish(adapter, version)
        answers = ask(engine, prompts)
        assert not [answer.error for answer in answers if answer.error]
        assert {answer.version for answer in answers} == {version}
        ratios = measure_ratios(adapter, prompts, answers)
        print(f"version {version}: {len(ratios)} tokens, ratio {ratios.min():.6f} to {ratios.max():.6f}")
        assert (ratios - 1).abs().max() < 1e-3
        for answer in answers:
            assert answer.is_cut == (answer.ids[-1] not in template.stop_ids)
            assert len(answer.ids) <= MAX_NEW_TOKENS
        answered.append([answer.ids for answer in answers])
    assert answered[0] != answered[1] != answered[2] != answered[0]
    # The other adapter's answers are not those of this one: its ratios are far from 1.
    assert (measure_ratios(make_adapter(1), prompts, answers) - 1).abs().max() > 0.05
    engine.close()


def test_versions_published_while_requests_run_are_kept_apart(
    address: str, template: ChatTemplate, make_adapter: Callable[..., Path], prompts: list[list[int]], tmp_path: Path
) -> None:
    engine = PolicyServer(address, tmp_path, template)
    adapters = {version: make_adapter(version) for version in (1, 2)}
    engine.publish(adapters[1], 1)
    answers: list[Continuation] = []
    many = prompts * 4
    thread = threading.Thread(target=lambda: answers.extend(ask(engine, many)))
    thread.start()
    engine.publish(adapters[2], 2)
    thread.join()
    answers += ask(engine, prompts)
    assert not [answer.error for answer in answers if answer.error]
    assert {answer.version for answer in answers} == {1, 2}
    for version in (1, 2):
        own = [answer for answer in answers if answer.version == version]
        asked = [(many if answer.index >= len(prompts) else prompts)[answer.index] for answer in own]
        assert (measure_ratios(adapters[version], asked, own) - 1).abs().max() < 1e-3
    engine.close()


def test_a_rank_over_the_limit_is_one_sentence(
    address: str,
    template: ChatTemplate,
    make_adapter: Callable[..., Path],
    prompts: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = PolicyServer(address, tmp_path, template)
    with pytest.raises(ConfigError, match=r"the adapter has rank 16, over the server's limit .*--max-lora-rank 16"):
        engine.publish(make_adapter(1, 16), 1)
    assert {answer.version for answer in ask(engine, prompts[:2])} == {0}
    missing = PolicyServer(address, tmp_path, template)
    unseen = PublishedAdapter("unseen", 1, Path("/no/such/fctune-adapter"))
    monkeypatch.setattr(missing._adapters, "copy", lambda policy, version: unseen)
    with pytest.raises(ConfigError, match=r"the server does not see /no/such/fctune-adapter"):
        missing.publish(make_adapter(1), 1)


def test_a_server_that_ends_is_waited_for_and_one_without_adapters_is_named(
    vllm_python: str,
    template: ChatTemplate,
    make_adapter: Callable[..., Path],
    prompts: list[list[int]],
    tmp_path: Path,
) -> None:
    port, said = find_port(), list[str]()
    patience = ServerPatience(poll_s=1.0, max_wait_s=600.0)
    with serve_vllm(TINY_BASE, vllm_python, port, "--max-model-len", "512", adapters=RANK) as address:
        engine = PolicyServer(address, tmp_path, template, patience=patience, log=said.append)
        engine.publish(make_adapter(1), 1)
        before = ask(engine, prompts)
    answers: list[Continuation] = []
    thread = threading.Thread(target=lambda: answers.extend(ask(engine, prompts)))
    thread.start()
    with serve_vllm(TINY_BASE, vllm_python, port, "--max-model-len", "512", adapters=RANK):
        thread.join(300)
    assert [answer.ids for answer in answers] == [answer.ids for answer in before]
    assert "is unavailable" in said[0]
    assert "is back after" in said[-1]
    with serve_vllm(TINY_BASE, vllm_python, port, "--max-model-len", "512") as address:
        plain = PolicyServer(address, tmp_path, template)
        with pytest.raises(ConfigError, match=r"does not load adapters at run time .* fctune serve --adapters"):
            plain.publish(make_adapter(1), 1)
