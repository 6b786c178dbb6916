"""``fctune plan``: output, exit codes, JSON and bad input."""

from __future__ import annotations

import json
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from fctune.apps.plan.request import PlanRequest
from fctune.base.gpus import GPUS
from fctune.cli import main
from tests.conftest import ROOT, TINY_BASE, run_with_closed_pipe


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["plan", "--config", str(ROOT / "configs" / "llama3_1_8b_lora.yaml"), *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_json_contains_the_plan_and_null_for_unknown_figures(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--nodes", "2", "--json", "--failures-per-gpu-day", "0")
    plan = json.loads(out)
    assert (code, plan["version"], plan["memory"]["fits"]) == (0, 2, True)
    assert plan["hours"] is None
    assert plan["storage"]["best_interval_s"] is None
    known = set(plan["memory"]) - {"total", "phase", "fits", "margin"}
    assert plan["memory"]["total"] == sum(plan["memory"][name] for name in known)
    _, out, _ = run(capsys, "--nodes", "2", "--json", "--rows", "100000", "--mean-tokens", "600", "--price", "2")
    plan = json.loads(out)
    assert plan["cost"] == pytest.approx(2 * plan["gpu_hours"]) == pytest.approx(32 * plan["hours"])
    assert (plan["price"], plan["disk_gb_s"]) == (2, 1)


def test_one_gpu_is_planned_by_the_short_option(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--gpus", "1", "--gpu", "L40S")
    assert "1 x 1 l40s (" in out
    assert "one GPU (one rank)" in out
    assert code == ("does not fit" in out)


def test_a_gpu_may_be_named_with_its_number_on_a_node_as_in_the_tasks(capsys: pytest.CaptureFixture[str]) -> None:
    for name, machines in (("H200:1", "1 x 1 h200 ("), ("L40:8", "1 x 8 l40 (")):
        code, out, _ = run(capsys, "--gpu", name)
        assert code == 0
        assert machines in out


def test_the_default_price_is_the_configs(capsys: pytest.CaptureFixture[str]) -> None:
    data = ("--nodes", "2", "--json", "--rows", "100000", "--mean-tokens", "600", "price_per_gpu_hour=3")
    _, out, _ = run(capsys, *data)
    plan = json.loads(out)
    assert plan["cost"] == pytest.approx(3 * plan["gpu_hours"])
    low, high = plan["hours_range"]
    assert low < plan["hours"] < high
    _, out, _ = run(capsys, *data, "--price", "2", "--efficiency", "0.4")
    plan = json.loads(out)
    assert plan["cost"] == pytest.approx(2 * plan["gpu_hours"])
    assert plan["hours_range"] is None


def test_hours_and_cost_include_the_startup_by_part(capsys: pytest.CaptureFixture[str]) -> None:
    data = ("--nodes", "2", "--json", "--rows", "100000", "--mean-tokens", "600", "--price", "2")
    plan = json.loads(run(capsys, *data)[1])
    startup = dict(plan["startup"])
    total, given = startup.pop("total_s"), startup.pop("given_s")
    assert given is None
    assert total == pytest.approx(sum(startup.values()))
    assert startup["download_s"] == pytest.approx(plan["storage"]["base_bytes"] / 0.25e9)
    assert startup["load_s"] == pytest.approx(2 * plan["storage"]["base_bytes"] / 1e9)  # two nodes hold a copy each
    assert plan["hours"] == pytest.approx(plan["training_hours"] + total / 3600)
    none = json.loads(run(capsys, *data, "--startup-min", "0")[1])
    assert none["hours"] == none["training_hours"] == plan["training_hours"]
    assert plan["costs"]["gpus"] - none["costs"]["gpus"] == pytest.approx(2 * 16 * total / 3600)
    faster = json.loads(run(capsys, *data, "--download-gb-s", "2.5", "compile=false")[1])["startup"]
    assert faster["download_s"] == pytest.approx(startup["download_s"] / 10)
    assert faster["compile_s"] == 0 < startup["compile_s"]
    text = run(capsys, *(word for word in data if word != "--json"))[1]
    assert "image of 8 GB (assumed) at 0.25 GB/s (--download-gb-s); " in text


@pytest.mark.parametrize(
    ("config", "overrides", "num_shared"),
    [
        ("llama3_1_8b_lora", (), 0),
        # To shard 4-bit linears, a node needs all of them: of attention, and of MLPs.
        ("llama3_1_8b_lora", ("adapter.base=nf4",), 32 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 14_336)),
        # A node of eight GPUs holds all experts if eight ranks do, and a half of them if sixteen do.
        ("qwen3_30b_a3b_lora", ("parallel.expert=8",), 48 * 128 * 3 * 2048 * 768),
        ("qwen3_30b_a3b_lora", ("parallel.expert=16",), 0),
    ],
)
def test_two_nodes_with_shards_of_the_base_both_read_what_both_hold(
    config: str, overrides: tuple[str, ...], num_shared: int, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(ROOT / "configs" / f"{config}.yaml")
    plan = json.loads(run(capsys, "--config", path, "--nodes", "2", "--json", "parallel.mode=fsdp", *overrides)[1])
    assert plan["startup"]["load_s"] == pytest.approx((plan["storage"]["base_bytes"] + 2 * num_shared) / 1e9)


@pytest.mark.parametrize(("size", "gigabytes"), [("20b", 13.8), ("120b", 65.2)])
def test_experts_stored_in_mxfp4_are_downloaded_as_such_and_exported_in_bfloat16(
    size: str, gigabytes: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sizes are those of the published repositories."""
    storage = json.loads(run(capsys, "--config", str(ROOT / "configs" / f"gpt_oss_{size}_lora.yaml"), "--json")[1])[
        "storage"
    ]
    assert storage["base_bytes"] / 1e9 == pytest.approx(gigabytes, rel=0.01)
    assert storage["export_bytes"] > 2 * {"20b": 20.9e9, "120b": 116.8e9}[size]


def test_traffic_is_priced_by_the_exports_size_or_as_given(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    prices = tmp_path / "prices.yaml"
    prices.write_text("egress_gib: 0.5\n")
    data = ("--nodes", "2", "--json", "--rows", "100000", "--mean-tokens", "600", "--prices", str(prices))
    plan = json.loads(run(capsys, *data)[1])
    exported_gib = plan["storage"]["export_bytes"] / 2**30
    assert plan["costs"]["traffic"] == pytest.approx(0.5 * exported_gib)
    code, text, _ = run(capsys, *(word for word in data if word != "--json"), "--egress-gib", "40")
    assert code == 0
    assert "+ traffic of 40.0 GiB 20.00;" in text
    code, _, err = run(capsys, *data, "--egress-gib", "-1")
    assert code == 2
    assert "--egress-gib -1: expected 0 or more." in err


def test_own_prices_count_in_the_configs_currency(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    prices = tmp_path / "prices.yaml"
    prices.write_text("gpu_hour: {H100: 2.1}\nshared_gib_month: 0.05\n")
    data = ("--nodes", "2", "--rows", "100000", "--mean-tokens", "600", "currency=EUR")
    text = run(capsys, *data, "--prices", str(prices))[1]
    assert " EUR at 2.1 EUR per GPU-hour" in text
    assert " EUR = GPUs " in text
    assert "+ shared disk of 2,000 GiB " in text
    assert "; price of a GPU-hour: 2.1" in text
    assert " EUR" not in run(capsys, *data)[1], "list prices are in dollars"


def test_an_unavailable_model_is_reported_at_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    code, _, err = run(capsys, "model.path=hf:some/model@main")
    assert code == 2
    assert "model.path=hf:some/model@main: config.json cannot be downloaded (ConnectionError: HF_HUB_OFFLINE" in err
    assert "Pass --model DIR" in err


def test_an_unsupported_model_on_the_hub_is_reported_by_its_hub_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    served = tmp_path / "some" / "model" / "resolve" / "main"
    served.mkdir(parents=True)
    (served / "config.json").write_text('{"model_type": "mamba"}')

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(
            "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
            f"http://127.0.0.1:{server.server_port}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
        )
        code, _, err = run(capsys, "model.path=hf:some/model@main")
        server.shutdown()
    assert code == 2
    assert err.startswith("hf:some/model/config.json: model_type='mamba' has layers without attention only")


# With which the default config does not fit on small GPUs.
UNSHARED = ("parallel.mode=ddp", "parallel.context=1", "activation_checkpointing.mlp_tiles=1")


def test_output_and_exit_code_say_if_the_run_fits(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--nodes", "2", "--search", "--rows", "100000", "--mean-tokens", "600")
    assert code == 0
    for words in (
        "fits: ",
        "fastest that fits: ",
        "GPU-hours",
        "space on the shared disk",
        "space on each node's own disk",
        "recommended: 1 node, ",
    ):
        assert words in out
    assert "largest useful cluster" not in out
    code, out, _ = run(capsys, "--gpu", "l4", *UNSHARED)
    assert code == 1
    assert "does not fit" in out


def test_the_layout_names_shared_rows_and_tiles(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "--nodes", "1", "data.seq_len=131072")
    assert "rows over 8, MLPs in 8 tiles (" in " ".join(out.split())
    assert "activation_checkpointing.mlp_tiles=8" in " ".join(out.split())


def test_options_are_listed_if_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    config = str(ROOT / "configs" / "qwen2_5_72b_full.yaml")
    assert main(["plan", "--config", config, "--nodes", "1", "--search", "parallel.context=1"]) == 1
    out = capsys.readouterr().out
    assert "nothing fits; options: more or larger GPUs, an adapter instead of all weights, an 8-bit optimizer" in out
    rows = {line.split()[0]: line for line in out[out.index("fastest that fits") :].splitlines() if line[:1].isdigit()}
    assert "nothing fits" in rows["1"]
    assert rows["1"].split()[-1] == "no"
    assert rows["8"].split()[-1] == "yes"
    assert "largest useful cluster: 16 nodes; global_batch_size=128 packs cannot be split over twice as many" in out


def test_options_that_are_already_set_are_not_listed(capsys: pytest.CaptureFixture[str]) -> None:
    long = ("--gpu", "l4", "--gpus-per-node", "1", "data.seq_len=65536", "parallel.cpu_offload=true")
    code, out, _ = run(capsys, *long, "adapter.base=nf4")
    assert code == 1
    assert "nothing fits; options: more or larger GPUs, data.seq_len below 65536\n" in out
    _, out, _ = run(capsys, *long)
    assert "nothing fits; options: more or larger GPUs, adapter.base=nf4, data.seq_len below 65536\n" in out


@pytest.mark.parametrize(
    ("arguments", "num_idle", "num_packs"),
    [
        (["--nodes", "64", "global_batch_size=512"], 0, 512),
        (["--nodes", "65", "global_batch_size=512"], 8, 512),
        (["--nodes", "2", "global_batch_size=1", "parallel.context=1"], 15, 1),
        (["--nodes", "2", "global_batch_size=1"], 8, 1),  # those of a node share the row
        (["--nodes", "2", "--rows", "50", "--mean-tokens", "800", "global_batch_size=512"], 6, 10),
    ],
)
def test_gpus_without_data_are_counted_in_the_plan_as_a_run_counts_its_ranks(
    arguments: list[str], num_idle: int, num_packs: int, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, *arguments)
    number = 8 * int(arguments[1])
    packs = "1 pack" if num_packs == 1 else f"{num_packs} packs"
    assert (f"{num_idle} of {number} GPUs have no data: a step has {packs};" in out) == bool(num_idle)
    assert code == 0
    _, out, _ = run(capsys, *arguments, "--json")
    assert json.loads(out)["idle_gpus"] == num_idle


def test_gpus_without_data_make_a_step_no_faster(capsys: pytest.CaptureFixture[str]) -> None:
    steps = {}
    for nodes in ("64", "128"):
        _, out, _ = run(capsys, "--nodes", nodes, "--json", "parallel.mode=ddp", "parallel.context=1")
        steps[nodes] = json.loads(out)["step"]
    assert steps["128"]["compute_s"] == steps["64"]["compute_s"]


@pytest.mark.parametrize(("arguments", "code"), [([], 0), (["--gpu", "l4"], 1)])
def test_a_closed_pipe_does_not_change_the_exit_code(arguments: list[str], code: int) -> None:
    config = ["--config", "configs/llama3_1_8b_lora.yaml", "--nodes", "2", *UNSHARED]
    assert run_with_closed_pipe("plan", *config, *arguments) == code


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpu", "h900"], "--gpu h900: unknown GPU; did you mean h200? known: b300, b200, gh200"),
        (["--gpu", "h900", "--gpu-memory-gib", "80"], "pass --gpu-memory-gib and --tflops"),
        (["--gpu-memory-gib", "-1"], "--gpu-memory-gib -1: expected a finite number greater than 0."),
        (["--nodes", "0"], "--nodes 0: expected 1 or more."),
        (["--gpu", "h100:x"], "--gpu h100:x: expected NAME, or NAME:N"),
        (["--gpu", "h100:4", "--gpus", "2"], "--gpu h100:4: expected NAME, or NAME:N with the N of --gpus-per-node"),
        (["--gpu", "h100:0"], "--gpus-per-node 0: expected 1 or more."),
        (["--rows", "10"], "--mean-tokens: missing; --rows and --mean-tokens must be given together"),
        (["--rows", "10", "--mean-tokens", "5000"], "--mean-tokens 5000: expected 1 to data.seq_len=4096"),
        (["--rows", "0", "--mean-tokens", "50"], "--rows 0: expected 1 or more."),
        (["--efficiency", "2"], "--efficiency 2: expected more than 0 and at most 1."),
        (["--startup-min", "-1"], "--startup-min -1: expected 0 or more."),
        (["--download-gb-s", "0"], "--download-gb-s 0: expected a finite number greater than 0."),
        (["--search", "--deadline-hours", "nan"], "--deadline-hours nan: expected a finite number greater than 0."),
        (["--deadline-hours", "2"], "--deadline-hours: only --search chooses a number of nodes; add --search."),
        (["--disk-gb-s", "0"], "--disk-gb-s 0: expected a finite number greater than 0."),
        (["--model", "nowhere"], "--model nowhere: no such directory; pass the one with the model's config.json"),
        (["--model", str(TINY_BASE / "config.json")], "/config.json: no such directory; pass the one with"),
        (["--model", str(ROOT / "configs")], "configs/config.json: no such file"),
        (["--gpu", "a100", "adapter.base=float8"], "adapter.base=float8: --gpu a100 has no float8 matrix products"),
        (["--gpus-per-node", "6", "adapter.base=nf4", "parallel.mode=fsdp"], "cannot be sharded over 6 ranks"),
        (
            ["optimizer={_component_: torchao.optim._AdamW, bf16_stochastic_round: true}", "parallel.mode=fsdp"],
            "optimizer.bf16_stochastic_round: torchao does not support it for sharded weights, and the layout is fsdp",
        ),
        (["--nodes", "2", "parallel.mode=hsdp", "parallel.replicate=3"], "does not divide the 16 ranks"),
    ],
    ids=str,
)
def test_bad_input_is_reported_in_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert len(err.strip().splitlines()) == 1


def test_all_problems_of_a_plan_come_at_once_and_the_model_first(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "--gpu", "a100", "adapter.base=float8", "model.path=hf:no/such-model")
    assert code == 2
    assert [line.split(":")[0] for line in err.splitlines()] == ["model.path=hf", "adapter.base=float8"]


def test_wrong_options_of_a_plan_are_reported_with_the_problems_of_its_config(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, _, err = run(capsys, "--gpu", "h900", "--nodes", "0", "--disk-gb-s", "0", "epochs=0")
    assert code == 2
    for words in ("epochs=0: expected 1 or more", "--gpu h900: unknown GPU", "--nodes 0:", "--disk-gb-s 0:"):
        assert words in err


def test_the_planned_disks_are_those_of_the_tasks() -> None:
    request = PlanRequest(gpu=GPUS["h100"])
    shared = yaml.safe_load((ROOT / "sky" / "volumes" / "shared.yaml").read_text())
    task = yaml.safe_load((ROOT / "sky" / "finetune.yaml").read_text())
    (disk,) = task["config"]["kubernetes"]["pod_config"]["spec"]["volumes"]
    network = disk["ephemeral"]["volumeClaimTemplate"]["spec"]["resources"]["requests"]["storage"]
    assert (shared["size"], network) == (f"{request.shared_gib:.0f}Gi", f"{request.network_gib:.0f}Gi")
