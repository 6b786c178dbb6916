"""A hybrid in a real vLLM on the CPU: a trained adapter answers there as in PEFT, merged and loaded at run time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from fctune.cli import main
from tests.models.hybrid_samples import save_hybrid
from tests.ranks import find_port
from tests.serving.servers import serve_vllm

pytestmark = pytest.mark.serving

# vLLM's kernels for CPUs take heads of 32 and more.
SIZES = {"hidden_size": 128, "head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
MAMBA = {"mamba_n_heads": 16, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}
HYBRIDS: dict[str, dict[str, Any]] = {
    "falcon_h1": SIZES | MAMBA | {"mamba_d_ssm": 256},
    "granitemoehybrid": SIZES | MAMBA,
}
PROMPT = [5, 17, 33, 101, 250, 7, 9, 44, 12, 61]
NUM_TOKENS = 12


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in HYBRIDS])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, vllm_python: str) -> Path:
    """Directory of a run of three steps on a hybrid model, with ``base`` next to it."""
    folder = tmp_path_factory.mktemp(request.param)
    save_hybrid(request.param, folder / "base", with_tokenizer=True, **HYBRIDS[request.param])
    words = ["tiny_lora", f"model.path={folder / 'base'}", f"output_dir={folder / 'run'}", "adapter.modules=all-linear"]
    words += ["data.sources.0.path=synthetic:train:24:1", "max_steps=3", "lr_scheduler={name: constant}"]
    words += [
        "adapter.rank=8",
        "adapter.train_tokens=off",
        "optimizer.lr=1e-2",
        "data.seq_len=512",
        "parallel.mode=ddp",
    ]
    assert main(["train", *words]) == 0
    return folder / "run"


def answer_here(base: Path, adapter: Path | None) -> tuple[list[int], list[float]]:
    """Return greedy tokens and their log-probabilities by transformers, and PEFT."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter))
    tokens, scores = list(PROMPT), []
    with torch.no_grad():
        for _ in range(NUM_TOKENS):
            logits = model.eval()(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
            tokens.append(int(logits.argmax()))
            scores.append(float(logits.float().log_softmax(-1)[tokens[-1]]))
    return tokens[len(PROMPT) :], scores


def answer_served(address: str, name: str) -> tuple[list[int], list[float]]:
    """Return what a server answers to the same prompt."""
    body = {"model": name, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "logprobs": 1}
    body |= {"ignore_eos": True, "return_tokens_as_token_ids": True}
    answer = httpx.post(f"{address}/v1/completions", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    found = answer.json()["choices"][0]["logprobs"]
    return [int(token.removeprefix("token_id:")) for token in found["tokens"]], found["token_logprobs"]


def require_equal(
    found: tuple[Sequence[int], Sequence[float]], expected: tuple[Sequence[int], Sequence[float]]
) -> None:
    assert found[0] == expected[0]
    assert found[1] == pytest.approx(expected[1], abs=1e-3)


def test_a_hybrid_answers_as_here_merged_and_with_an_adapter_loaded_at_run_time(run: Path, vllm_python: str) -> None:
    base, adapter = run.parent / "base", run / "export" / "adapter"
    expected = answer_here(base, adapter)
    assert expected[0] != answer_here(base, None)[0], "training has changed what the model says"
    environment = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
    with serve_vllm(run, vllm_python, find_port(), **environment) as address:
        require_equal(answer_served(address, "run"), expected)
    with serve_vllm(base, vllm_python, find_port(), "--enable-lora", "--max-lora-rank", "8", **environment) as address:
        body = {"lora_name": "tuned", "lora_path": str(adapter)}
        loaded = httpx.post(f"{address}/v1/load_lora_adapter", json=body, timeout=120)
        assert loaded.status_code == 200, loaded.text
        require_equal(answer_served(address, "tuned"), expected)
        require_equal(answer_served(address, "base"), answer_here(base, None))
