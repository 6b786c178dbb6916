"""Accuracy while training equals that of the export, and measuring it changes nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from fctune.base import distributed
from fctune.base.distributed import World
from fctune.base.errors import ConfigError, DataError
from fctune.cli.eval_options import run_module
from fctune.config.loading import load_config
from fctune.config.sections.data import DataConfig, SourceConfig
from fctune.config.sections.evaluation import EvalConfig
from fctune.data.conversation import Conversation
from fctune.data.prepared_set import prepare
from fctune.data.sources.reader import read_source
from fctune.data.synthetic import iter_cases
from fctune.engines.engine import make_prompts
from fctune.engines.local import LocalEngine
from fctune.models.base_weights import load_base_
from fctune.models.causal_lm import materialize_
from fctune.models.precision import PrecisionPolicy
from fctune.models.sources import build_model, read_architecture
from fctune.tasks.evaluation.held_out import cut_after_answer, find_held_out_cases
from fctune.tasks.evaluation.live import LiveEvaluation, build_answering, check_answering_memory
from tests.conftest import TINY_BASE
from tests.models.expert_samples import save_base
from tests.models.hybrid_samples import save_hybrid
from tests.models.tiny_models import load_hf, save_tiny_model
from tests.ranks import run_ranks
from tests.recipes.recipe_runs import CONFIGS, Kind, run_kind_on_rank, run_on_rank

NUM_CASES = 10


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("cases") / "cases.jsonl"
    file.write_text("".join(json.dumps(case.to_json()) + "\n" for case in iter_cases(NUM_CASES, 77)))
    return file


def argv(output: Path, *overrides: str, kind: Kind = "lora") -> list[str]:
    dropout = ["adapter.dropout=0.1"] if kind == "lora" else []
    return [
        *("--config", CONFIGS[kind], f"output_dir={output}"),
        *("data.sources.0.path=synthetic:train:300:1", "max_steps=6", "data.validation_share=0"),
        *("lr_scheduler.warmup=0", *dropout, *overrides),
    ]


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def every(cases: Path, n: int, *more: str) -> list[str]:
    return [f"eval.every={n}", f"eval.cases={cases}", "eval.max_share_of_time=1", *more]


@pytest.mark.parametrize(
    ("kind", "world_size", "mode", "source"),
    [
        pytest.param("lora", 2, "fsdp", "transformers", marks=pytest.mark.thorough),
        *(
            pytest.param(*how, "transformers", marks=pytest.mark.slow)
            for how in (("lora", 4, "hsdp"), ("full", 2, "fsdp"))
        ),
        *(
            pytest.param(kind, *how, "torchtune", marks=pytest.mark.slow)
            for kind in ("lora", "full")
            for how in ((1, "auto"), (2, "fsdp"), (3, "ddp"), (4, "hsdp"))
        ),
    ],
)
def test_it_scores_what_the_export_scores_and_leaves_training_as_it_was(
    kind: str, world_size: int, mode: str, source: str, cases: Path, tmp_path: Path
) -> None:
    shape = [f"parallel.mode={mode}", *(["parallel.replicate=2"] if mode == "hsdp" else []), "global_batch_size=4"]
    shape.append(f"model.source={source}")
    runs = {}
    for name, overrides in (("without", []), ("with", every(cases, 2))):
        results = run_ranks(run_kind_on_rank, world_size, argv(tmp_path / name, *shape, *overrides, kind=kind), kind)
        assert [result["code"] for result in results] == [0] * world_size, results
        runs[name] = metrics_of(tmp_path / name)
    keys = ("step", "loss", "grad_norm", "data_digest")
    assert [[m[k] for k in keys] for m in runs["with"]] == [[m[k] for k in keys] for m in runs["without"]]
    weights = [load_file(tmp_path / name / "export" / "merged" / "model.safetensors") for name in runs]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert [m["step"] for m in runs["with"] if "eval_accuracy" in m] == [2, 4, 6]

    out = tmp_path / "results.jsonl"
    model = str(tmp_path / "with" / "export" / "merged")
    assert run_module("eval", "eval.tool_calls", ["--model", model, "--cases", str(cases), "--out", str(out)]) == 0
    verdicts = [json.loads(line)["verdict"] for line in out.read_text().splitlines()]
    last = runs["with"][-1]
    assert last["eval_num_cases"] == len(verdicts) == NUM_CASES
    assert last["eval_accuracy"] == verdicts.count("correct") / NUM_CASES
    best = max(m["eval_accuracy"] for m in runs["with"] if "eval_accuracy" in m)
    kept = (tmp_path / "with" / "checkpoints" / "best").resolve().name
    first_best = next(m["step"] for m in runs["with"] if m.get("eval_accuracy") == best)
    assert kept == f"elastic-checkpoint-{first_best}"


def answers_of(world: World, config_argv: list[str], cases: Path) -> dict[str, list[str]]:
    """Answers of a sharded model whose adapters do something: out of training, and from its export."""
    from fctune.models.export import export_merged
    from fctune.models.lora import apply_lora_, init_adapters_
    from fctune.tasks.suite_files import read_cases
    from fctune.training.setup import build_base, shard_and_load_

    config = load_config(config_argv[1], config_argv[2:])
    assert config.adapter is not None
    base = Path(config.model.path)
    model = build_base(config, base, world)
    apply_lora_(model, config.adapter)
    shard_and_load_(model, config, base, world)
    init_adapters_(model, 1)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_b"):
            torch.nn.init.constant_(parameter, 0.002)
    export_merged(model, base, Path(config.output_dir), is_writer=world.is_main)
    torch.distributed.barrier()
    live = LiveEvaluation(EvalConfig(every=1, cases=str(cases)), base, world)._engine(model)
    prompts = make_prompts([case.prompt for case in read_cases(cases)], 40)
    engines = {"live": live, "export": LocalEngine(config.output_dir)}
    return {name: [a.text for a in sorted(e.answer(prompts), key=lambda a: a.index)] for name, e in engines.items()}


BASES: dict[str, Callable[[Path], Path]] = {
    "the demo's base": lambda path: TINY_BASE,
    "hybrid": lambda path: save_hybrid("lfm2", path, with_tokenizer=True),
    "mixture of experts": lambda path: save_base("qwen3_moe", path, with_tokenizer=True),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "kind", ["the demo's base", "hybrid", pytest.param("mixture of experts", marks=pytest.mark.slow)]
)
def test_the_answers_of_a_sharded_model_are_those_of_the_export(kind: str, cases: Path, tmp_path: Path) -> None:
    base = BASES[kind](tmp_path / "base")
    modules = [] if base == TINY_BASE else ["adapter.modules=all-linear"]
    overrides = argv(tmp_path / "out", "parallel.mode=fsdp", f"model.path={base}", *modules)
    for answers in run_ranks(answers_of, 2, overrides, cases):
        assert answers["live"] == answers["export"]
        assert len(set(answers["live"])) > 3


@pytest.mark.thorough
def test_evaluation_that_would_cost_too_much_is_left_out_but_for_the_first_and_last(
    cases: Path, tmp_path: Path
) -> None:
    run_ranks(run_on_rank, 1, argv(tmp_path / "run", *every(cases, 1, "eval.max_share_of_time=0.0001")))
    lines = metrics_of(tmp_path / "run")
    assert [m["step"] for m in lines if "eval_accuracy" in m] == [1, 6]
    assert [m["step"] for m in lines if "eval_skipped" in m] == [2, 3, 4, 5]


def test_a_run_ends_early_where_accuracy_rises_no_more_and_stays_so(cases: Path, tmp_path: Path) -> None:
    overrides = every(cases, 1, "eval.early_stop=2", "eval.max_cases=5", "optimizer.lr=0.0")
    launches = run_ranks(launch_again, 1, argv(tmp_path / "run", *overrides), tmp_path / "run")[0]
    assert [launch["code"] for launch in launches] == [0, 0, 0], launches
    assert "already complete" in launches[1]["out"]
    assert "raise eval.early_stop or set it to null" in launches[1]["out"]
    # An evaluation that takes longer than the training so far is left out.
    metrics = metrics_of(tmp_path / "run")
    evaluated = [m["step"] for m in metrics if "eval_accuracy" in m]
    assert len(evaluated) == 3
    assert metrics[-1]["step"] == evaluated[-1] < 6
    assert (tmp_path / "run" / "export" / "merged" / "model.safetensors").is_file()


def launch_again(world: World, command: list[str], run: Path) -> list[dict[str, Any]]:
    """Run a command, again with more steps, and once more without the exports and the end, as a kill leaves it."""
    with patch.object(distributed, "shutdown_distributed"):
        launches = [run_on_rank(world, command), run_on_rank(world, [*command, "max_steps=9"])]
        shutil.rmtree(run / "export")
        (run / "exit.json").unlink()
        return [*launches, run_on_rank(world, command)]


def test_evaluation_without_cases_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"eval\.cases=validation: data\.validation_share=0 holds out no rows"):
        load_config(CONFIGS["lora"], ["eval.every=5", "data.validation_share=0"])
    with pytest.raises(ConfigError, match=r"eval\.cases=nowhere"):
        load_config(CONFIGS["lora"], ["eval.every=5", "eval.cases=nowhere.jsonl"])


@torch.no_grad()
@pytest.mark.parametrize("family", ["gemma3", "qwen3_moe", "deepseek_v3"])
def test_models_of_transformers_answer_with_their_own_weights(family: str, tmp_path: Path) -> None:
    base = save_tiny_model(family, tmp_path / "base")
    model = build_model(read_architecture(base, "transformers"), 64, PrecisionPolicy.uniform(torch.float32))
    materialize_(model, torch.device("cpu"))
    load_base_(model, base)
    tokens = torch.arange(3, 20)[None]
    expected = load_hf(base)(input_ids=tokens).logits
    assert torch.allclose(
        build_answering(model, base, torch.device("cpu"))(input_ids=tokens).logits, expected, atol=1e-5, rtol=1e-5
    )


def test_evaluation_of_a_model_that_fits_on_no_device_is_refused_at_the_start() -> None:
    model = build_model(read_architecture(TINY_BASE), 64, PrecisionPolicy.uniform(torch.bfloat16))
    num_bytes = 2 * sum(p.numel() for p in model.parameters())
    check_answering_memory(model, 10, num_bytes + 10, "eval.every", "Set eval.every=0")
    with pytest.raises(ConfigError, match=r"eval\.every: answering needs the complete model on each device"):
        check_answering_memory(model, 11, num_bytes + 10, "eval.every", "Set eval.every=0")


@pytest.mark.thorough
def test_a_run_can_ask_the_conversations_that_it_holds_out(tmp_path: Path) -> None:
    overrides = ["data.validation_share=0.2", "eval.every=100%", "eval.cases=validation", "eval.max_cases=7"]
    rows = ["data.sources.0.path=synthetic:train:100:1", "max_steps=2", "eval.max_new_tokens=8"]
    result = run_ranks(run_on_rank, 1, argv(tmp_path / "run", *overrides, *rows))[0]
    assert result["code"] == 0, result
    assert metrics_of(tmp_path / "run")[-1]["eval_num_cases"] == 7


def test_held_out_cases_are_those_of_the_validation_split(tmp_path: Path) -> None:
    source = SourceConfig(path="synthetic:train:100:1")
    config = DataConfig(sources=[source, source], validation_share=0.3, seq_len=1024)  # the same rows twice
    prepared = prepare(config, TINY_BASE, tmp_path)
    cases = find_held_out_cases(config, prepared)
    flat, _ = prepared.packs["validation"]
    held_out = {int(digest) for digest in prepared.digests[flat]}
    assert {int(case.id, 16) for case in cases} == held_out
    assert len(cases) == len(held_out) > 10
    conversations = {c.digest(): c for c in read_source(source.path) if isinstance(c, Conversation)}
    for case in cases:
        messages = conversations[case.id].messages
        answer = messages[len(case.prompt.messages)]
        assert case.prompt.messages == messages[: len(case.prompt.messages)]
        assert (answer.role, answer.calls) == ("assistant", case.expected)
    assert {case.category for case in cases} == {"call", "no_call"}
    few = find_held_out_cases(config, prepared, 4)
    assert len({case.id for case in few}) == len(few) == 4


def test_held_out_cases_expect_supervised_turns_only(write_rows: Callable[..., Path], tmp_path: Path) -> None:
    def call(number: int, day: str) -> dict[str, Any]:
        function = {"name": "get_weather", "arguments": json.dumps({"day": day})}
        return {"role": "assistant", "tool_calls": [{"id": f"c{number}", "type": "function", "function": function}]}

    properties = {"day": {"type": "string"}}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {"properties": properties}}}
    rows = []
    for number in range(20):
        rows.append([
            {"role": "user", "content": f"Weather on day {number}?"},
            {**call(1, "tomorrow"), "weight": 0},
            {"role": "tool", "tool_call_id": "c1", "content": "error: no date"},
            call(2, f"2024-05-{number + 1:02}"),
            {"role": "tool", "tool_call_id": "c2", "content": "rain"},
            {"role": "assistant", "content": "Rain."},
        ])  # fmt: skip
    source = SourceConfig(path=str(write_rows([{"messages": messages, "tools": [tool]} for messages in rows])))
    config = DataConfig(sources=[source], validation_share=0.5, seq_len=1024)
    cases = find_held_out_cases(config, prepare(config, TINY_BASE, tmp_path / "prepared"))
    assert cases
    for case in cases:
        assert len(case.prompt.messages) == 3
        assert case.expected[0].arguments["day"].startswith("2024-05-")
    conversation = cases[0].prompt
    assert cut_after_answer(conversation) is None, "its only answer is not supervised"


def test_a_run_without_held_out_tools_is_refused(tmp_path: Path) -> None:
    config = DataConfig(sources=[SourceConfig(path="synthetic:train:10:1")], validation_share=0, seq_len=1024)
    with pytest.raises(DataError, match=r"eval\.cases=validation: no held-out conversation has tools"):
        find_held_out_cases(config, prepare(config, TINY_BASE, tmp_path))
