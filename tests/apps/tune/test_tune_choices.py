"""``fctune tune`` chooses a shipped config by family and size, and the rest by the rows and the machine."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import pytest
import yaml

from fctune.apps.tune.choices import (
    PreparedFacts,
    RowFacts,
    choose_shipped,
    draft_config,
    find_smaller,
    fit_config,
    list_shipped,
    size_config,
)
from fctune.apps.tune.machine import Machine, find_machine
from fctune.base.errors import ConfigError
from fctune.base.gpus import GIB, GPUS
from fctune.config.schema import DEFAULT_BATCH_SIZE, RunConfig
from fctune.config.sections.data import SourceConfig
from fctune.models.planned_model import find_architecture
from fctune.models.run_config import load_run_config

ROWS = [SourceConfig(path="synthetic:train:1")]
CPU = Machine(0, replace(GPUS["h100"], name="CPU", memory_bytes=16 * GIB))
H100 = Machine(1, GPUS["h100"])


def choose(
    model: str, machine: Machine, facts: RowFacts, *given: str, has_cases: bool = False
) -> tuple[RunConfig, dict[str, str]]:
    """Return the config of a tune, and the reason of each value."""
    architecture, model_dir, _ = find_architecture(model)
    draft, _ = draft_config(model, architecture, machine, Path("out/run"), ROWS, given)
    size_config(draft, facts, architecture, machine, has_cases)
    assert fit_config(draft, architecture, model_dir, machine) is not None
    return draft.parse(), {key: reason for key, _, reason in draft.list_choices()}


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("fctune/assets/tiny_base", "tiny_lora"),
        ("hf:Qwen/Qwen3-8B", "qwen3_8b_lora"),  # the model itself
        ("hf:meta-llama/Llama-3.2-3B-Instruct", "llama3_1_8b_lora"),  # its family's nearest
        ({"model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24}, "qwen2_5_coder_0_5b_lora"),
        ({"model_type": "mistral", "hidden_size": 896, "num_hidden_layers": 28}, "qwen3_0_6b_lora"),  # its size's
    ],
)
def test_the_config_is_that_of_the_model_else_of_its_family_and_size(
    model: str | dict[str, object], expected: str, tmp_path: Path
) -> None:
    if not isinstance(model, str):
        sizes = {"intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936}
        more = {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True}
        (tmp_path / "config.json").write_text(json.dumps(model | sizes | more))
        model = str(tmp_path)
    architecture, _, _ = find_architecture(model)
    shipped, reason = choose_shipped(model, architecture)
    assert shipped.name == expected
    assert reason.startswith(f"as {expected}.yaml")


def test_the_rows_are_the_users_alone_and_every_key_has_a_reason() -> None:
    config, reasons = choose("hf:Qwen/Qwen3-8B", H100, RowFacts(3_000, 1_500_000, 1_800))
    assert [source.path for source in config.data.sources] == ["synthetic:train:1"]
    assert (config.output_dir, config.success, config.telemetry) == ("out/run", None, None)
    assert config.data.seq_len == 2048  # of 1,800 tokens
    assert config.adapter is not None
    assert (config.adapter.rank, config.precision, config.compile) == (32, "bf16", True)  # of the shipped config
    assert config.micro_batch_size in (1, 2, 4, 8)
    assert "about 201 of 3,000 rows" in reasons["data.validation_share"]
    assert "GiB of 79.1" in reasons["micro_batch_size"]
    assert all(reasons.values())


def test_few_rows_get_small_batches_and_several_passes_and_many_rows_the_usual() -> None:
    few, _ = choose("fctune/assets/tiny_base", CPU, RowFacts(100, 20_000, 300))
    many, _ = choose("fctune/assets/tiny_base", CPU, RowFacts(60_000, 12_000_000, 300))
    assert (few.epochs, few.data.validation_share, few.global_batch_size) == (10, 0.2, 1)
    assert (many.epochs, many.data.validation_share, many.global_batch_size) == (1, 0.02, 2)
    thorough, _ = choose("fctune/assets/tiny_base", CPU, RowFacts(6_000, 1_200_000, 300), "gate.thorough=true")
    assert thorough.data.validation_share == 0.1, "600 cases for falls of 5 points"
    for config in (few, many):
        assert (config.precision, config.compile) == ("fp32", False)  # no GPU
        assert config.gate is not None
        assert config.gate.benchmarks == []
    cases, _ = choose("fctune/assets/tiny_base", CPU, RowFacts(12, 2_000, 300), has_cases=True)
    assert cases.data.validation_share == 0.0


def test_processors_that_multiply_bf16_faster_train_real_models_in_it() -> None:
    facts = RowFacts(3_000, 1_500_000, 1_800)
    slow, fast = (Machine(0, replace(CPU.gpu, bf16_tflops=rate, fp32_tflops=0.1)) for rate in (0.15, 0.5))
    assert [choose("hf:Qwen/Qwen3-0.6B", machine, facts)[0].precision for machine in (slow, fast)] == ["fp32", "bf16"]
    assert choose("fctune/assets/tiny_base", fast, facts)[0].precision == "fp32"


def test_what_the_user_sets_is_never_chosen() -> None:
    given = ("epochs=7", "optimizer.lr=1e-3", "data.seq_len=512")
    config, reasons = choose("fctune/assets/tiny_base", CPU, RowFacts(100, 20_000, 300), *given)
    assert (config.epochs, config.optimizer["lr"], config.data.seq_len) == (7, 1e-3, 512)
    assert reasons["epochs"] == "command line"
    short, _ = choose("fctune/assets/tiny_base", CPU, RowFacts(100, 20_000, 300), *given, "max_steps=40")
    assert short.log_every_n_steps == 2, "of the steps that are trained, not of those of all epochs"
    with pytest.raises(ConfigError, match="epoch: unknown key"):
        choose("fctune/assets/tiny_base", CPU, RowFacts(100, 20_000, 300), "epoch=7")


def test_a_section_that_the_user_sets_in_part_keeps_the_choices_of_its_other_keys() -> None:
    facts = RowFacts(100, 20_000, 300)
    _, alone = choose("fctune/assets/tiny_base", CPU, facts)
    _, reasons = choose("fctune/assets/tiny_base", CPU, facts, "lr_scheduler={min_factor: 0.2}", "validation={}")
    assert reasons["lr_scheduler.min_factor"] == "command line"
    assert reasons["lr_scheduler.warmup"] == alone["lr_scheduler.warmup"]
    assert "validation.every" in alone
    assert "validation.every" not in reasons, "emptied by the user"


def test_rows_longer_than_the_model_reads_are_divided_and_said() -> None:
    config, reasons = choose("fctune/assets/tiny_base", CPU, RowFacts(100, 900_000, 90_000))
    assert config.data.overlong == "split_turns"
    assert "the longest row has 90,000" in reasons["data.seq_len"]
    last, _ = choose("fctune/assets/tiny_base", CPU, RowFacts(100, 900_000, 90_000), "data.train_reasoning=last")
    assert last.data.overlong == "drop"


def test_rows_longer_than_the_length_that_the_user_sets_are_divided() -> None:
    config, reasons = choose("fctune/assets/tiny_base", CPU, RowFacts(100, 90_000, 2_000), "data.seq_len=1024")
    assert (config.data.seq_len, config.data.overlong) == (1024, "split_turns")
    assert reasons["data.seq_len"] == "command line"


@pytest.mark.thorough
def test_a_base_that_fits_in_4_bits_alone_is_trained_so_and_one_that_does_not_names_smaller_models() -> None:
    small = Machine(1, replace(GPUS["l4"], memory_bytes=11 * GIB, name="small"))
    config, reasons = choose("hf:Qwen/Qwen3-8B", small, RowFacts(3_000, 1_500_000, 900))
    assert config.adapter is not None
    assert config.adapter.base == "nf4"
    assert reasons["adapter.base"] == "in bf16 the base does not fit in 1 GPU (small, 11.0 GiB)"
    architecture, model_dir, _ = find_architecture("hf:Qwen/Qwen3-32B")
    draft, _ = draft_config("hf:Qwen/Qwen3-32B", architecture, small, Path("out"), ROWS, [])
    assert fit_config(draft, architecture, model_dir, small) is None
    smaller = find_smaller(architecture, small)
    assert smaller == ["hf:Qwen/Qwen3-8B", "hf:Qwen/Qwen3-4B-Instruct-2507"]


def test_the_written_config_reads_back_the_same_with_a_comment_after_each_value(tmp_path: Path) -> None:
    architecture, _, _ = find_architecture("fctune/assets/tiny_base")
    draft, _ = draft_config("fctune/assets/tiny_base", architecture, CPU, tmp_path / "run", ROWS, ["epochs=2"])
    path = tmp_path / "tune.yaml"
    path.write_text(draft.render("made by a test"))
    assert load_run_config(path) == draft.parse()
    text = path.read_text()
    lines = [line for line in text.splitlines()[2:] if not line.endswith(":")]
    assert all(" # " in line for line in lines)
    assert list(yaml.safe_load(text))[:3] == ["output_dir", "model", "data"]


def test_every_shipped_lora_config_is_a_candidate() -> None:
    names = {shipped.name for shipped in list_shipped()}
    assert {"tiny_lora", "qwen3_8b_lora", "llama3_3_70b_lora", "gpt_oss_20b_lora"} <= names
    assert not {"tiny_dpo", "tiny_grpo", "tiny_full", "acceptance_cpu"} & names


def test_more_gpus_than_there_are_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--gpus 64: there (is|are) .* here"):
        find_machine(64)


@pytest.mark.parametrize(
    ("key", "default"),
    [("data.validation_share", 0.02), ("data.seq_len", 4096), ("epochs", 3), ("global_batch_size", DEFAULT_BATCH_SIZE)],
)
def test_a_key_that_the_user_unsets_has_its_default(key: str, default: float) -> None:
    for word in (f"~{key}", f"{key}=null"):
        config, _ = choose("fctune/assets/tiny_base", CPU, RowFacts(1_000, 300_000, 500), word)
        assert attrgetter(key)(config) == default


def test_tokens_of_a_step_take_the_place_of_its_packs() -> None:
    for more in ([], ["~global_batch_size"]):
        config, reasons = choose(
            "hf:Qwen/Qwen3-8B", H100, RowFacts(1_000, 300_000, 500), "global_batch_tokens=8192", *more
        )
        assert config.global_batch_tokens == 8192
        assert "global_batch_size" not in reasons


def test_rows_without_tools_do_not_count_as_rows_that_only_call() -> None:
    config, _ = choose("hf:Qwen/Qwen3-8B", H100, RowFacts(1_000, 300_000, 500, no_calls=50, no_tools=900))
    assert config.data.augment is None
    _, reasons = choose("hf:Qwen/Qwen3-8B", H100, RowFacts(1_000, 300_000, 500, no_calls=5, no_tools=900))
    assert reasons["data.augment.take_away"].startswith("5 of 100 rows with tools call none")


def test_rows_without_a_call_that_repeat_each_other_count_once() -> None:
    facts = RowFacts(360, 100_000, 500, no_calls=58, requests=314, no_call_requests=12)
    _, reasons = choose("hf:Qwen/Qwen3-8B", H100, facts)
    assert reasons["data.augment.take_away"].startswith("12 of 314 different requests with tools call none")


@pytest.mark.parametrize(
    ("answer", "thinks", "longest", "limit"), [(40, False, 300, 256), (700, True, 900, 1920), (700, True, 40_000, 960)]
)
def test_the_gate_gives_answers_the_room_of_the_longest(answer: int, thinks: bool, longest: int, limit: int) -> None:
    architecture, _, _ = find_architecture("hf:Qwen/Qwen3-8B")
    draft, _ = draft_config("hf:Qwen/Qwen3-8B", architecture, H100, Path("out/run"), ROWS, [])
    prepared = PreparedFacts(91, 91_000, 54, 52, answer_tokens=answer, prints_reasoning=thinks)
    size_config(draft, RowFacts(360, 100_000, longest), architecture, H100, False, prepared)
    gate = draft.parse().gate
    assert gate is not None
    assert gate.max_new_tokens == limit


def test_the_numbers_of_the_prepared_set_take_the_place_of_estimates() -> None:
    facts = RowFacts(360, 100_000, 300)
    architecture, _, _ = find_architecture("fctune/assets/tiny_base")
    draft, _ = draft_config("fctune/assets/tiny_base", architecture, CPU, Path("out/run"), ROWS, ["epochs=10"])
    size_config(draft, facts, architecture, CPU, False, PreparedFacts(packs=91, tokens=91_000, held_out=54, cases=52))
    reasons = {key: reason for key, _, reason in draft.list_choices()}
    config = draft.parse()
    steps = config.epochs * math.ceil(91 / config.global_batch_size)
    assert reasons["global_batch_size"] == f"packs of seq_len tokens; {steps} steps"
    assert reasons["data.validation_share"] == "54 of 360 rows held out, 52 cases for the gate; never trained on"


def test_the_choice_by_the_rows_and_the_machine_is_kept_with_its_reason() -> None:
    chosen = RowFacts(100, 900_000, 90_000, seq_len=4096, length_reason="rows of 8,192 tokens do not fit")
    config, reasons = choose("fctune/assets/tiny_base", CPU, chosen)
    assert (config.data.seq_len, config.data.overlong) == (4096, "split_turns")
    assert reasons["data.seq_len"] == "rows of 8,192 tokens do not fit"
    for given, length in (("auto", 4096), ("2048", 2048), ("1024 auto", 4096)):
        settings = [f"data.seq_len={value}" for value in given.split()]
        assert choose("fctune/assets/tiny_base", CPU, chosen, *settings)[0].data.seq_len == length
