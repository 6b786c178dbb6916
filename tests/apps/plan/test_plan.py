"""Plans of this project's configs on their clusters; the search, and the table of GPUs."""

from __future__ import annotations

import json
import math
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.planner import read_gpu_results
from fctune.apps.plan import table
from fctune.apps.plan.estimate import COMPILE_S, SETUP_S
from fctune.apps.plan.plan import Plan, make_plan
from fctune.apps.plan.request import PlanRequest
from fctune.apps.plan.table import print_plan
from fctune.base.errors import ConfigError
from fctune.base.gpus import GPUS, find_gpu
from fctune.base.terminal import Terminal
from fctune.cli import main
from fctune.config.cache import prepared_root
from fctune.config.loading import load_config
from fctune.data.prepared_set import prepare
from fctune.parallel.footprint import SAFE_SHARE
from fctune.parallel.layout import Hardware, choose_layout
from fctune.parallel.search import format_overrides, list_overrides
from tests.configs.cluster_cases import CASES
from tests.conftest import ROOT, TINY_BASE
from tests.parallel.sample_plans import GIB, LLAMA, make_config


def test_72b_on_64_h100_takes_less_than_3000_gpu_hours_for_9_billion_tokens() -> None:
    """Assumed: an instruction set of 4.5 billion tokens (5 million rows of 900), two epochs."""
    config = load_config(ROOT / "configs" / "qwen2_5_72b_full.yaml", ["data.validation_share=0"])
    plan = make_plan(config, PlanRequest(find_gpu("h100"), 8, 8, rows=5_000_000, mean_tokens=900))
    assert plan.estimate.hours is not None
    assert plan.hours_range is not None
    # 6 operations per weight and token at the rate of products, and nothing else, is the least.
    least = 6 * 72.7e9 * 2 * 4.5e9 / (989e12 * 0.726) / 3600
    assert least < plan.hours_range[0] * 64 < plan.estimate.hours * 64 < plan.hours_range[1] * 64 < 3300


FULL = {"precision": "bf16_mixed", "compile": True}
FULL_CONFIG = str(ROOT / "configs" / "llama3_1_8b_full.yaml")
ALL = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml") if not path.stem.startswith("acceptance_"))


def cluster_options(name: str) -> list[str]:
    case = CASES.get(name)
    if case is None:
        return ["--gpu", "l4", "--gpus-per-node", "2"]
    return ["--nodes", str(case.nodes), "--gpus-per-node", str(case.ranks_per_node)]


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Return a list of the plans that ``fctune plan`` prints from now on."""
    plans: list[Plan] = []

    def keep(terminal: Terminal, plan: Plan) -> None:
        plans.append(plan)
        print_plan(terminal, plan)

    monkeypatch.setattr(table, "print_plan", keep)
    return plans


# One of each kind of model and training; tests/configs plans the memory of all.
PLANNED = (
    *("gpt_oss_20b_lora", "granite4_micro_lora", "llama3_2_1b_qlora", "qwen2_5_72b_full"),
    *("qwen3_0_6b_lora", "tiny_dpo", "tiny_grpo"),
)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in PLANNED else pytest.mark.thorough) for name in ALL]
)
def test_every_config_is_planned_and_fits_its_own_cluster(
    name: str, printed: list[Plan], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    started = time.process_time()
    data = ["--rows", "100000", "--mean-tokens", "500"] if name in CASES else []
    code = main(["plan", "--config", f"configs/{name}.yaml", *cluster_options(name), "--search", *data])
    assert code == 0, capsys.readouterr().out
    # Layers that the formulas do not describe are traced; other tests may run on the machine at the same time.
    assert time.process_time() - started < 30
    (plan,) = printed
    assert plan.fits
    assert plan.largest_micro_batch >= plan.config.micro_batch_size
    fastest = plan.fastest
    assert fastest is not None
    assert all(v.tokens_per_s_per_gpu <= fastest.tokens_per_s_per_gpu for v in plan.variants if v.fits)
    if name in CASES:
        case = CASES[name]
        base = plan.num_parameters - (plan.num_trained if plan.config.adapter is not None else 0)
        assert (base, plan.num_trained) == (case.num_parameters, case.num_trained)
        assert (plan.setting.mode, plan.setting.replicate, plan.setting.shard) == case.layout


@pytest.mark.slow  # processor time, which other work on the machine inflates
def test_the_largest_config_is_planned_in_under_5_seconds() -> None:
    """Measured as CPU time, including start-up, so that other work on the machine matters little."""
    command = [sys.executable, "-m", "fctune.cli", "plan", "--config", "configs/qwen2_5_72b_full.yaml", "--search"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([*command, *cluster_options("qwen2_5_72b_full")], cwd=ROOT, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5


def test_a_matching_prepared_set_is_counted_and_another_is_not(tmp_path: Path) -> None:
    overrides = [f"output_dir={tmp_path}/run", f"model.path={TINY_BASE}", "data.sources.0.path=synthetic:train:200:7"]
    config = load_config(ROOT / "configs" / "tiny_full.yaml", overrides)
    request = PlanRequest(find_gpu("h100"), 1, 1)
    assert make_plan(config, request).rows is None
    prepared = prepare(config.data, TINY_BASE, prepared_root(config))
    plan = make_plan(config, request)
    rows = plan.rows
    assert rows is not None
    flat, _ = prepared.packs["train"]
    lengths = [int(prepared.offsets[i + 1] - prepared.offsets[i]) for i in flat]
    assert rows.tokens == sum(lengths)
    assert rows.pairs == sum(n * (n + 1) // 2 for n in lengths)
    assert rows.slots == prepared.num_packs("train") * 1024
    assert plan.num_steps == config.epochs * math.ceil(prepared.num_packs("train") / 2)
    config.data.sources[0].path = "synthetic:train:300:7"
    assert make_plan(config, request).rows is None


RECOMMENDATIONS = {
    # Five GPU-hours of training: a second node makes start-up dearer than the time that it saves.
    "short": ("llama3_1_8b_lora", {"rows": 150_000, "mean_tokens": 500.0}, None, 1),
    "short, in a hurry": ("llama3_1_8b_lora", {"rows": 150_000, "mean_tokens": 500.0}, 0.2, 4),
    "long": ("llama3_1_8b_lora", {"rows": 100_000_000, "mean_tokens": 500.0, "startup_min": 5.0}, None, 16),
    "long, no hurry": ("llama3_1_8b_lora", {"rows": 10_000_000, "mean_tokens": 500.0}, 100.0, 1),
    "impossible": ("llama3_1_8b_lora", {"rows": 10_000_000, "mean_tokens": 500.0}, 0.1, None),
    "large": ("qwen2_5_72b_full", {"rows": 60_000, "mean_tokens": 500.0}, None, 4),
    "unknown length": ("llama3_1_8b_lora", {}, None, None),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize(("name", "data", "deadline", "nodes"), RECOMMENDATIONS.values(), ids=list(RECOMMENDATIONS))
@pytest.mark.parametrize("price", [3.85, None])
def test_the_search_weighs_cost_against_time(
    name: str, data: dict[str, Any], deadline: float | None, nodes: int | None, price: float | None
) -> None:
    request = PlanRequest(find_gpu("h100"), price=price, is_searching=True, deadline_hours=deadline, **data)
    plan = make_plan(load_config(name), request)
    found = plan.recommended
    assert (None if found is None else found.nodes) == nodes
    timed = [point for point in plan.scaling if point.hours is not None]
    costs = {point.nodes: point.gpu_hours if price is None else point.cost for point in timed}
    if found is None:
        assert all(deadline is not None and point.hours > deadline for point in timed)
    elif deadline is None:
        assert costs[found.nodes] <= 1.1 * min(costs.values())
        assert all(costs[point.nodes] > 1.1 * min(costs.values()) for point in timed if point.hours < found.hours)
    else:
        assert costs[found.nodes] == min(costs[point.nodes] for point in timed if point.hours <= deadline)


def test_more_gpus_stop_paying_off_on_a_slow_network() -> None:
    config = load_config(ROOT / "configs" / "llama3_1_8b_full.yaml")
    slow = replace(find_gpu("h100"), nic_gb_s=0.05)
    plan = make_plan(config, PlanRequest(slow, 1, 8, rows=100_000, mean_tokens=500, is_searching=True))
    pays = {point.nodes: point.pays for point in plan.scaling}
    assert pays[1]
    assert not pays[16]
    assert list(pays.values()) == sorted(pays.values(), reverse=True)


def test_an_unknown_gpu_can_be_described_by_options() -> None:
    options = {"--gpu-memory-gib": 24.0, "--tflops": 100.0, "--nic-gb-s": 3.0, "--link-gb-s": None}
    gpu = find_gpu("mine", options)
    assert (gpu.memory_bytes, gpu.bf16_tflops, gpu.nic_gb_s, gpu.source) == (24 * GIB, 100, 3, "from options")
    assert find_gpu("h100", {"--gpu-memory-gib": 90.0}).memory_bytes == 90 * GIB
    assert "from options: --gpu-memory-gib" in find_gpu("h100", {"--gpu-memory-gib": 90.0}).source
    with pytest.raises(ConfigError, match="known"):
        find_gpu("mine", {"--gpu-memory-gib": 24.0})


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("L40S", "l40s"),
        ("NVIDIA H200", "h200"),
        ("H100-80GB", "h100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("H100_SXM5", "h100"),
        ("h100pcie", "h100-pcie"),
        ("A100-80GB", "a100"),
        ("A100-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("A100-PCIE-40GB", "a100-pcie-40gb"),
        ("B200-192GB", "b200"),
        ("RTX 4090", "rtx4090"),
        ("3090", "rtx3090"),
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000-ada"),
        ("Tesla V100-SXM2-32GB", "v100-32gb"),
        ("Tesla T4", "t4"),
    ],
)
def test_a_gpu_is_found_in_the_spellings_that_people_type(spelling: str, name: str) -> None:
    assert find_gpu(spelling).name == name


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("h10", "did you mean h100?"),
        ("RTX 3090 Ti", "did you mean rtx3090"),
        ("A100-64GB", "did you mean a100 or a100-40gb?"),  # no such memory
        ("GPU", "unknown GPU; known: b300, "),
    ],
)
def test_an_unknown_gpu_is_refused_with_the_nearest_and_the_known_ones(name: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"^--gpu {name}: unknown GPU") as caught:
        find_gpu(name)
    assert near in str(caught.value)
    assert ", rtx5090, " in str(caught.value)


def test_a_gpu_without_bfloat16_is_planned_in_float32_only() -> None:
    request = PlanRequest(find_gpu("T4"), 1, 1)
    with pytest.raises(ConfigError, match=r"--gpu t4: has no bfloat16, .* Plan it with precision=fp32"):
        make_plan(load_config("qwen3_0_6b_lora", []), request)
    plan = make_plan(load_config("qwen3_0_6b_lora", ["precision=fp32"]), request)
    assert plan.gpu_rate == pytest.approx(8.1)


def test_every_gpu_in_the_table_names_its_sources() -> None:
    for gpu in GPUS.values():
        assert gpu.source.startswith("https://"), gpu.name
        assert gpu.machine, gpu.name
        assert gpu.fp8_tflops is None or gpu.fp8_tflops == pytest.approx(2 * gpu.bf16_tflops, rel=0.02), gpu.name


@pytest.mark.parametrize(
    ("name", "nodes", "seq_len"),
    [
        ("llama3_1_8b_lora", 1, 131_072),
        pytest.param("llama3_3_70b_lora", 2, 32_768, marks=pytest.mark.thorough),
        pytest.param("gpt_oss_20b_lora", 1, 65_536, marks=pytest.mark.thorough),
    ],
)
def test_long_rows_fit_without_settings_in_the_fastest_way(name: str, nodes: int, seq_len: int) -> None:
    request = PlanRequest(find_gpu("h100"), nodes)
    length = [f"data.seq_len={seq_len}", "activation_checkpointing.fraction=null"]
    plan = make_plan(load_config(name, length), request)
    assert plan.peak.footprint.total <= SAFE_SHARE * request.gpu.memory_bytes
    for context in (1, 2, 4, 8):
        # Experts are not computed in tiles, and products of less than 2,048 tokens are slower than planned.
        for tiles in (1, 8) if name != "gpt_oss_20b_lora" and seq_len // context // 8 >= 2048 else (1,):
            shared = [f"parallel.context={context}", f"activation_checkpointing.mlp_tiles={tiles}"]
            other = make_plan(load_config(name, [*length, *shared]), request)
            fits = other.peak.footprint.total <= SAFE_SHARE * request.gpu.memory_bytes
            assert not fits or plan.estimate.time.total_s < 1.05 * other.estimate.time.total_s


def test_what_fits_without_tiles_and_shared_rows_has_none() -> None:
    request = PlanRequest(find_gpu("h100"), 2)
    plan = make_plan(load_config("llama3_1_8b_lora", []), request)
    assert (plan.setting.context, plan.setting.mlp_tiles) == (1, 1)
    assert {(v.setting.context, v.setting.mlp_tiles) for v in plan.variants} == {(1, 1)}


def test_tiles_are_chosen_where_a_step_does_not_fit_without() -> None:
    request, alone = PlanRequest(find_gpu("l4"), 1, 1), ["adapter.base=nf4", "micro_batch_size=1"]
    alone += ["adapter.dropout=0", "data.seq_len=28672"]
    config = load_config("llama3_1_8b_lora", alone)
    plan = make_plan(config, request)
    assert (plan.setting.fraction, plan.setting.mlp_tiles) == (1.0, 8)
    assert plan.fastest is not None
    assert list_overrides(config, plan.fastest.setting)["activation_checkpointing.mlp_tiles"] == 8
    without = load_config("llama3_1_8b_lora", [*alone, "activation_checkpointing.mlp_tiles=1"])
    assert make_plan(without, request).fastest is None


def test_an_unknown_gpu_has_the_fewest_ranks_to_a_row_that_fit() -> None:
    config = load_config("llama3_1_8b_lora", ["data.seq_len=131072"])
    search = make_plan(config, PlanRequest(find_gpu("h100"), 1)).search
    unknown = Hardware("cuda", 8, 8, search.gpu.memory_bytes)
    known = replace(unknown, gpu=search.gpu)
    contexts = [choose_layout(search.config, search.model, one, search.memory).context for one in (unknown, known)]
    assert contexts == [2, 8]


RUNS_THAT_RESTRICT_LAYOUTS = [
    ("qwen3_30b_a3b_lora", []),
    ("qwen3_30b_a3b_lora", ["parallel.expert=8", "compile=false"]),
    ("gpt_oss_20b_lora", ["parallel.expert=16", "compile=false", "parallel.mode=fsdp"]),
    ("llama3_2_1b_qlora", ["parallel.mode=hsdp", "parallel.replicate=4"]),
    ("qwen3_0_6b_lora", ["parallel.mode=fsdp", "parallel.cpu_offload=true"]),
    ("qwen3_0_6b_lora", ["activation_checkpointing.fraction=1", "activation_checkpointing.offload=true"]),
]


def check_recommendations(name: str, overrides: list[str], request: PlanRequest) -> None:
    """Plan a run, and load its config with the overrides of every setting that the plan may recommend."""
    config = load_config(name, overrides)
    plan = make_plan(config, request)
    settings = [variant.setting for variant in plan.variants]
    settings += [point.best.setting for point in plan.scaling if point.best is not None]
    assert settings
    for setting in settings:
        loaded = load_config(name, [*overrides, *format_overrides(list_overrides(config, setting)).split()])
        assert setting.mode in (loaded.parallel.mode, "none")
        assert loaded.activation_checkpointing.fraction == setting.fraction
        assert loaded.micro_batch_size == setting.micro_batch_size


@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "overrides"), RUNS_THAT_RESTRICT_LAYOUTS)
def test_every_layout_that_a_plan_recommends_is_accepted_by_the_config(name: str, overrides: list[str]) -> None:
    check_recommendations(name, overrides, PlanRequest(gpu=find_gpu("h100"), nodes=2, is_searching=True))


@pytest.mark.slow
@pytest.mark.parametrize("model", sorted(json.loads((ROOT / "fctune/models/public_configs.json").read_text())))
def test_layouts_recommended_for_public_models_are_accepted_by_the_config(model: str) -> None:
    for nodes, gpus_per_node in ((1, 1), (1, 8), (2, 8)):
        request = PlanRequest(gpu=find_gpu("h100"), nodes=nodes, gpus_per_node=gpus_per_node)
        check_recommendations("qwen3_8b_lora", [f"model.path=hf:{model}"], request)


def test_ranks_over_which_experts_cannot_be_spread_are_refused_by_the_plan() -> None:
    config = load_config("qwen3_30b_a3b_lora", ["parallel.expert=8", "compile=false"])
    with pytest.raises(ConfigError, match=r"parallel\.expert=8: does not divide the 4 ranks"):
        make_plan(config, PlanRequest(gpu=find_gpu("h100"), gpus_per_node=4))


def test_hours_in_the_search_include_saves_and_failures() -> None:
    config = make_config(LLAMA, 2048, adapter={"rank": 8}, compile=True, parallel={"mode": "ddp"})
    request = PlanRequest(
        find_gpu("h100"), 1, 8, rows=100_000, mean_tokens=500, failures_per_gpu_day=50.0, is_searching=True
    )
    plan = make_plan(config, request)
    best = plan.scaling[0].best
    assert best is not None
    assert (best.setting.mode, best.setting.replicate) == ("ddp", 8)
    assert plan.estimate.storage.lost_share > 0.01
    assert plan.num_steps is not None
    without = plan.num_steps * best.time.total_s / 3600
    started = plan.estimate.startup.total_s / 3600
    assert plan.scaling[0].hours == pytest.approx(started + without / (1 - plan.estimate.storage.lost_share))


def test_a_run_that_loses_most_of_its_time_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config", FULL_CONFIG, "--nodes", "2", "--failures-per-gpu-day", "100"]) == 0
    assert "the run hardly advances" in capsys.readouterr().out
    assert main(["plan", "--config", FULL_CONFIG, "--nodes", "2"]) == 0
    assert "the run hardly advances" not in capsys.readouterr().out


def test_float32_runs_at_the_rate_without_tensor_cores(capsys: pytest.CaptureFixture[str]) -> None:
    request = PlanRequest(find_gpu("h100"), 2, 8)
    alike = {"compile": True, "activation_checkpointing": {"fraction": 1.0}}
    wide = make_plan(make_config(LLAMA, 4096, precision="fp32", **alike), request)
    narrow = make_plan(make_config(LLAMA, 4096, precision="bf16", **alike), request)
    # Recomputed kernels between products move twice the bytes at the same rate.
    assert wide.estimate.time.compute_s == pytest.approx(narrow.estimate.time.compute_s * 989 / 67, rel=0.05)
    unknown = ["--gpu", "mine", "--gpu-memory-gib", "80", "--tflops", "900"]
    for arguments, is_unknown in (([], False), (unknown, True)):
        main(["plan", "--config", FULL_CONFIG, "--nodes", "2", "precision=fp32", *arguments])
        out = capsys.readouterr().out
        assert ("the rate of precision=fp32 is unknown for this GPU; bf16's was used" in out) is is_unknown
        assert ("of 67 TFLOP/s" in out) is not is_unknown


def test_offloading_costs_time() -> None:
    request = PlanRequest(find_gpu("h100"), 1, 8)
    here = make_plan(make_config(LLAMA, 4096, parallel={"mode": "fsdp"}, **FULL), request)
    away = make_plan(make_config(LLAMA, 4096, parallel={"mode": "fsdp", "cpu_offload": True}, **FULL), request)
    part = 8_030_261_248 / 8
    # 8 micro-batches of 2 over 8 ranks: each copies the float32 shards twice to the GPU and the gradients to the host.
    assert away.setting.accumulation == 8
    assert away.estimate.time.host_s == pytest.approx(8 * (2 * 4 * part + 4 * part) / 25e9, rel=0.01)
    # The host reads weights, gradients and two moments, and writes all but the gradients.
    assert away.estimate.time.update_s == pytest.approx(4 * 8 * part / 40e9, rel=0.01)
    assert away.estimate.time.total_s > here.estimate.time.total_s
    checkpointing = {"fraction": 1.0, "offload": True}
    kept = make_plan(make_config(LLAMA, 4096, activation_checkpointing=checkpointing, **FULL), request)
    assert kept.estimate.time.host_s == pytest.approx(
        2 * 32 * 4096 * 2 * (16 * 4096) / 25e9
    )  # each block's input, in both directions


def test_a_micro_batch_is_no_larger_than_a_ranks_share_of_the_batch() -> None:
    request = PlanRequest(find_gpu("h100"), 2, 8)
    sizes = {"adapter": {"rank": 8}, "global_batch_size": 16}
    small, large = (make_plan(make_config(LLAMA, 4096, micro_batch_size=size, **sizes), request) for size in (1, 64))
    assert large.fits
    assert (large.setting, large.peak, large.estimate.time) == (small.setting, small.peak, small.estimate.time)


def test_steps_bounded_by_the_config_are_not_reported_as_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config", FULL_CONFIG, "--nodes", "2", "max_steps=100"]) == 0
    out = capsys.readouterr().out
    assert "100 steps: " in out
    assert "hours are unknown" not in out
    assert "max_steps of full packs are assumed" in out


def test_setup_and_compilation_take_as_long_as_measured_on_an_h100() -> None:
    rows = [row for row in read_gpu_results().values() if "first_step_s" in row]
    assert len(rows) >= 6
    compiling = [row["first_step_s"] - statistics.median(row["tried"][0]["step_s"]) for row in rows]
    assert statistics.median(row["setup_s"] for row in rows) == pytest.approx(SETUP_S, abs=1)
    assert statistics.median(compiling) == pytest.approx(COMPILE_S, abs=1)


def plan_on_one_gpu(name: str, gpu: str, *overrides: str) -> tuple[int, bool]:
    """Return the planned bytes of the base on one GPU, and whether the run fits."""
    search = make_plan(load_config(name, [*overrides]), PlanRequest(find_gpu(gpu), 1, 1)).search
    peak = search.memory.peak(search.configured()[0])
    return peak.footprint.parameters, peak.footprint.total <= SAFE_SHARE * search.gpu.memory_bytes


def test_gpt_oss_120b_with_its_experts_as_stored_fits_on_one_80_gb_gpu() -> None:
    plain, packed = (plan_on_one_gpu("gpt_oss_120b_lora", "h100", f"adapter.base={base}") for base in ("bf16", "mxfp4"))
    num_weights = 36 * 128 * 3 * 2880 * 2880
    # Of two bytes for each weight, half a byte is left, and one for 32 of them.
    assert plain[0] - packed[0] == num_weights * 2 - num_weights // 2 - num_weights // 32
    assert (plain[1], packed[1]) == (False, True)


def test_a_mixture_in_float8_takes_a_byte_for_each_weight_and_a_scale_for_each_output() -> None:
    plain, packed = (
        plan_on_one_gpu("qwen3_30b_a3b_lora", "h100", f"adapter.base={base}") for base in ("bf16", "float8")
    )
    experts, linears = 48 * 128 * 3 * 2048 * 768, 48 * 2 * 2048 * (4096 + 512)
    outputs = 48 * (128 * (2 * 768 + 2048) + 4096 + 2 * 512 + 2048)
    assert plain[0] - packed[0] == experts + linears - 4 * outputs
    assert plain[1]
    assert packed[1]


def test_qwen3_30b_a3b_in_nf4_fits_on_one_48_gb_gpu() -> None:
    plain, packed = (plan_on_one_gpu("qwen3_30b_a3b_qlora", "l40s", f"adapter.base={base}") for base in ("bf16", "nf4"))
    experts, linears = 48 * 128 * 3 * 2048 * 768, 48 * 2 * 2048 * (4096 + 512)
    means = 48 * 128 * 2 * 2  # two bytes for each of an expert's two weights
    saved = (experts + linears) * (2 - 0.5 - 1 / 64 - 2 / 16_384) - means
    assert plain[0] - packed[0] == pytest.approx(saved, abs=9999)
    assert (plain[1], packed[1]) == (False, True)


@pytest.mark.parametrize("beta", [1.0, 0.5])
def test_a_distillation_counts_its_teachers_weights_forward_pass_and_logits(beta: float) -> None:
    teacher = "hf:meta-llama/Llama-3.1-8B"
    adapter = {"rank": 16, "modules": ["q_proj"]}
    raw = {"adapter": adapter, "precision": "bf16", "activation_checkpointing": {"fraction": 1.0}}
    distill = {"teacher": teacher, "on_policy_share": 0.0, "beta": beta}
    # A local teacher must exist; one on the hub need not be here to be counted.
    student = "hf:meta-llama/Llama-3.2-1B"
    alone = make_plan(make_config(student, 2048, **raw), PlanRequest(find_gpu("h100"), rows=100, mean_tokens=500))
    taught = make_plan(
        make_config(student, 2048, **raw, distill=distill), PlanRequest(find_gpu("h100"), rows=100, mean_tokens=500)
    )
    parameters = 8_030_261_248  # as published
    buffers = taught.peak.footprint.teacher - 2 * parameters
    assert 0 <= buffers < 2**24, "rotary tables"
    assert alone.peak.footprint.teacher == 0
    # Two operations a weight and token, of which the embedding has none, and the head at supervised positions alone.
    embedding = 128_256 * 4096
    share = taught.search.supervised_share
    least = 2 * (parameters - 2 * embedding) + 2 * embedding * share
    attention = 4 * 32 * 4096 * taught.search.pairs_per_token
    assert taught.flops.reference == pytest.approx(least + attention, rel=1e-3)
    assert taught.kernel_times.reference > taught.flops.reference / (find_gpu("h100").bf16_tflops * 1e6)
    assert taught.estimate.time.total_s > alone.estimate.time.total_s
    assert taught.search.memory.teacher is not None
