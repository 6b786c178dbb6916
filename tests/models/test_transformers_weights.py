"""Weights of transformers' models: loaded as transformers loads them, each rank its part, and exported as they came."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from fctune.base.distributed import World
from fctune.base.errors import CheckpointError, ConfigError
from fctune.checkpoint.hf_checkpoint import HFModelWeights
from fctune.checkpoint.tensors import named_trainable
from fctune.config.sections.adapter import AdapterConfig
from fctune.config.sections.parallel import ParallelConfig
from fctune.models.base_weights import find_targets, load_base_, plan_base
from fctune.models.causal_lm import CausalLM, materialize_
from fctune.models.export import export_adapter, export_merged, iter_merged
from fctune.models.lora import apply_lora_, init_adapters_
from fctune.models.precision import PrecisionPolicy
from fctune.models.sources import build_model, read_architecture
from fctune.models.transformers.weights import find_text_model
from fctune.parallel.layout import Hardware, choose_parallel_layout
from fctune.parallel.sharding import shard_
from tests.models.expert_samples import quantize_to_mxfp4
from tests.models.tiny_models import TEXT_MODELS, VISION_MODELS, load_hf, save_tiny_model
from tests.ranks import run_ranks

FAMILIES = [*TEXT_MODELS, *VISION_MODELS]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with a tiny model of each family, named by its model_type."""
    folder = tmp_path_factory.mktemp("bases")
    for family in FAMILIES:
        save_tiny_model(family, folder / family)
    return folder


def load(path: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    model = build_model(read_architecture(path, "transformers"), 64, PrecisionPolicy.uniform(dtype))
    materialize_(model, torch.device("cpu"))
    load_base_(model, path)
    return model


def read_text_weights(model: CausalLM, path: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return the weights that transformers loads for the text model of a directory, by our names."""
    architecture: Any = model.architecture
    weights = load_hf(path, dtype).state_dict()
    names = find_text_model(architecture).names
    return {target.name: weights[names[target.hf_name]] for target in find_targets(model)}


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_equal_those_that_transformers_loads(family: str, bases: Path) -> None:
    model = load(bases / family)
    expected = read_text_weights(model, bases / family)
    loaded = {target.name: target.tensor for target in find_targets(model)}
    assert set(loaded) >= {name for name, _ in model.named_parameters()}
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor), name


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_the_bias_of_a_router_is_loaded_in_float32_though_it_is_no_parameter(family: str, bases: Path) -> None:
    model = load(bases / family, torch.bfloat16)
    expected = read_text_weights(model, bases / family, torch.bfloat16)
    targets = {target.name: target.tensor for target in find_targets(model)}
    name = "decoder.model.layers.1.mlp.gate.e_score_correction_bias"
    assert targets[name].dtype is torch.float32
    assert torch.equal(targets[name], expected[name])


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_exports_have_the_tensors_of_the_base_and_load_as_the_trained_model(
    family: str, bases: Path, tmp_path: Path
) -> None:
    base, out = bases / family, tmp_path / "out"
    model = load(base)
    for target in find_targets(model):
        target.tensor.mul_(2)
    export_merged(model, base, out, is_writer=True)
    before, after = load_file(base / "model.safetensors"), load_file(out / "model.safetensors")
    assert {name: t.shape for name, t in after.items()} == {name: t.shape for name, t in before.items()}
    text = plan_base(model.architecture, base)
    copied = {leaf.name for leaf in text.copied}
    assert bool(copied) == (family in VISION_MODELS)
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor if name in copied else 2 * tensor), name
    trained = read_text_weights(model, out)
    for name, tensor in ((target.name, target.tensor) for target in find_targets(model)):
        assert torch.equal(trained[name], tensor), name


class Counter:
    """Counts the elements read of each stored tensor, in place of ``safe_open``."""

    def __init__(self) -> None:
        self.read: dict[str, int] = {}

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        counter = self

        class Slice:
            def __init__(self, name: str, stored: Any):
                self.name, self.stored = name, stored

            def __getitem__(self, region: Any) -> Tensor:
                part: Tensor = self.stored[region]
                counter.read[self.name] = counter.read.get(self.name, 0) + part.numel()
                return part

        class File:
            def __enter__(self) -> Any:
                self.tensors = safe_open(*arguments, **options).__enter__()
                return self

            def __exit__(self, *error: Any) -> None:
                return None

            def get_slice(self, name: str) -> Slice:
                return Slice(name, self.tensors.get_slice(name))

        return File()


def build_sharded(world: World, path: Path, counter: Counter, dtype: torch.dtype = torch.float32) -> CausalLM:
    model = build_model(read_architecture(path, "transformers"), 64, PrecisionPolicy.uniform(dtype))
    hardware = Hardware("cpu", world.world_size, world.world_size)
    config = ParallelConfig(mode="fsdp")
    layout = choose_parallel_layout(config, hardware, False, lambda _: None)  # type: ignore[arg-type, return-value]
    shard_(model, layout, config, hardware)
    materialize_(model, world.device)
    load_base_(model, path, counter)
    return model


def load_on_rank(world: World, folder: Path, families: list[str]) -> dict[str, Any]:
    """Load models over the ranks; compare them with transformers', and count what this rank held and read."""
    counts: dict[str, Any] = {}
    for family in families:
        counter = Counter()
        model = build_sharded(world, folder / family, counter)
        expected = read_text_weights(model, folder / family)
        held = 0
        for name, tensor in ((target.name, target.tensor) for target in find_targets(model)):
            local: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            full: Any = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[operator]
            held += local.numel()
            assert torch.equal(full, expected[name]), (family, name)
        counts[family] = {"held": held, "read": sum(counter.read.values()), "most": max(counter.read.values())}
    return counts


# Tied, fused by transformers, fused in the checkpoint, with a stored buffer, and within a vision-language model.
VARIED = ["smollm3", "qwen3_moe", "gpt_oss", "deepseek_v3", "gemma3"]


@pytest.mark.parametrize("families", [VARIED, pytest.param(FAMILIES, marks=pytest.mark.slow)], ids=["varied", "all"])
def test_each_of_two_ranks_reads_its_own_part_alone(families: list[str], bases: Path) -> None:
    ranks = run_ranks(load_on_rank, 2, bases, families)
    for family in families:
        total = sum(tensor.numel() for tensor in load_file(bases / family / "model.safetensors").values())
        for rank in ranks:
            assert rank[family]["read"] == rank[family]["held"], family
            assert rank[family]["held"] < 0.6 * total, family


def change_tensors(path: Path, out: Path, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    """Copy a model directory with its tensors changed, in place or as the returned ones."""
    shutil.copytree(path, out)
    tensors = load_file(path / "model.safetensors")
    save_file(change(tensors) or tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def rename(*pairs: tuple[str, str]) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    def run(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        renamed = {}
        for name, tensor in tensors.items():
            for old, new in pairs:
                if name.startswith(old):
                    name = new + name.removeprefix(old)
                    break
            renamed[name] = tensor
        return renamed

    return run


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("gemma3", rename(("model.language_model.", "language_model.model."), ("model.", ""))),
        ("mistral3", rename(("model.language_model.", "language_model.model."), ("model.", ""))),
        ("llama", rename(("model.", ""))),
    ],
    ids=["gemma3", "mistral3", "llama"],
)
def test_older_names_of_tensors_are_read_and_exported(
    family: str, change: Callable[[dict[str, Tensor]], Any], bases: Path, tmp_path: Path
) -> None:
    older = change_tensors(bases / family, tmp_path / "older", change)
    model, expected = load(older), load(bases / family)
    for ours, theirs in zip(find_targets(model), find_targets(expected), strict=True):
        assert torch.equal(ours.tensor, theirs.tensor), ours.name
    export_merged(model, older, tmp_path / "out", is_writer=True)
    stored, exported = (load_file(path / "model.safetensors") for path in (older, tmp_path / "out"))
    assert stored.keys() == exported.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in stored.items())


def test_a_checkpoint_with_fused_experts_keeps_them_fused(bases: Path, tmp_path: Path) -> None:
    def fuse(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        kept = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
        for layer in (0, 1):
            prefix = f"model.layers.{layer}.mlp.experts"
            gate, up, down = (
                torch.stack([tensors[f"{prefix}.{i}.{part}_proj.weight"] for i in range(4)])
                for part in ("gate", "up", "down")
            )
            kept |= {f"{prefix}.gate_up_proj": torch.cat((gate, up), 1), f"{prefix}.down_proj": down}
        return kept

    fused = change_tensors(bases / "qwen3_moe", tmp_path / "fused", fuse)
    model, expected = load(fused), load(bases / "qwen3_moe")
    for ours, theirs in zip(find_targets(model), find_targets(expected), strict=True):
        assert torch.equal(ours.tensor, theirs.tensor), ours.name
    export_merged(model, fused, tmp_path / "out", is_writer=True)
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == load_file(fused / "model.safetensors").keys()


def test_a_tied_weight_is_exported_under_the_names_that_the_base_has(bases: Path, tmp_path: Path) -> None:
    def repeat(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    def move(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    for number, change in enumerate((repeat, move)):
        base, out = change_tensors(bases / "smollm3", tmp_path / f"base-{number}", change), tmp_path / f"out-{number}"
        model = load(base)
        export_merged(model, base, out, is_writer=True)
        stored, exported = (load_file(path / "model.safetensors") for path in (base, out))
        assert stored.keys() == exported.keys()
        assert torch.equal(exported["lm_head.weight"], load(bases / "smollm3").embedding.weight)  # type: ignore[arg-type]


def test_prediction_heads_are_left_out_and_copied(bases: Path, tmp_path: Path) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        tensors["mtp.layers.0.mlp.down_proj.weight"] = torch.ones(3, 4)
        tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    base = change_tensors(bases / "qwen3_5", tmp_path / "base", add)
    export_merged(load(base), base, tmp_path / "out", is_writer=True)
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == load_file(base / "model.safetensors").keys()


def test_unused_keys_and_values_of_gemma_4_are_left_out_and_copied(tmp_path: Path) -> None:
    """Google's Gemma 4 E2B and E4B store them for layers that share an earlier layer's, too; transformers does not."""
    kinds = ["sliding_attention", "full_attention"] * 2
    changes: dict[str, Any] = {
        "num_hidden_layers": 4,
        "layer_types": kinds,
        "num_kv_shared_layers": 2,
        "global_head_dim": 16,
    }
    saved = save_tiny_model("gemma4_text", tmp_path / "saved", **changes)

    def repeat(tensors: dict[str, Tensor]) -> None:
        for layer in (0, 1):
            for part in ("k_proj", "v_proj", "k_norm"):
                name = f"model.layers.{{}}.self_attn.{part}.weight".format
                assert name(layer + 2) not in tensors
                tensors[name(layer + 2)] = tensors[name(layer)].clone()

    base = change_tensors(saved, tmp_path / "base", repeat)
    export_merged(load(base), base, tmp_path / "out", is_writer=True)
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == load_file(base / "model.safetensors").keys()


def drop_expert(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]


def drop_bias(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.1.mlp.gate.weight"]


def add_expert(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.2.mlp.experts.0.up_proj.weight"] = torch.zeros(3)


def cut_expert(tensors: dict[str, Tensor]) -> None:
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    tensors[name] = tensors[name][:-1].clone()


def cut_experts(tensors: dict[str, Tensor]) -> None:
    for i in range(4):
        name = f"model.layers.1.mlp.experts.{i}.up_proj.weight"
        tensors[name] = tensors[name][:-1].clone()


def spoil_expert(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.0.mlp.experts.2.down_proj.weight"][1, 1] = float("nan")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (drop_expert, r"1 missing: model\.layers\.1\.mlp\.experts\.3\.up_proj\.weight"),
        (drop_bias, r"1 missing: model\.layers\.1\.mlp\.gate\.weight"),
        (add_expert, r"1 extra: model\.layers\.2\.mlp\.experts\.0\.up_proj\.weight"),
        (cut_expert, r"experts\.2\.up_proj\.weight has the shape \[15, 32\].*\[16, 32\].*Download"),
        (cut_experts, r"gate_up_proj.*8 stored tensors.*\[4, 31, 32\], config\.json implies \[4, 32, 32\]"),
        (spoil_expert, r"experts\.2\.down_proj\.weight holds NaN or infinity"),
    ],
)
def test_experts_that_do_not_match_the_model_are_named(
    change: Callable[[dict[str, Tensor]], None], words: str, bases: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=words):
        load(change_tensors(bases / "qwen3_moe", tmp_path / "broken", change))


def test_a_tied_head_with_other_values_is_an_error(bases: Path, tmp_path: Path) -> None:
    def repeat(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from .*tie_word_embeddings"):
        load(change_tensors(bases / "smollm3", tmp_path / "base", repeat))


def test_directories_without_safetensors_are_explained(bases: Path, tmp_path: Path) -> None:
    def copy(name: str) -> Path:
        return Path(shutil.copytree(bases / "llama", tmp_path / name))

    pickled = copy("pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pickled \(pytorch_model\.bin\).*save_pretrained"):
        load(pickled)
    truncated = copy("truncated")
    content = (truncated / "model.safetensors").read_bytes()
    (truncated / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: damaged safetensors"):
        load(truncated)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"contains an adapter, not a model.*base_model_name_or_path"):
        load(adapter)


def set_config(path: Path, **values: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_other_quantisations_are_refused_by_name(bases: Path, tmp_path: Path) -> None:
    for family in ("llama", "qwen3"):
        path = Path(shutil.copytree(bases / family, tmp_path / family))
        set_config(path, quantization_config={"quant_method": "awq"})
        with pytest.raises(ConfigError, match=r"quant_method='awq'.*unquantised"):
            read_architecture(path)


def quantize_to_fp8(base: Path, out: Path) -> Path:
    """Store the linears of a model in float8 with a scale per block of 8 x 8 weights."""

    def quantize(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            rows, columns = tensors[name].shape
            blocks = tensors[name].view(rows // 8, 8, columns // 8, 8)
            scale = blocks.float().abs().amax((1, 3)) / 448
            rounded = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
            tensors |= {name: rounded.view(rows, columns), f"{name}_scale_inv": scale}

    path = change_tensors(base, out, quantize)
    set_config(path, quantization_config={"quant_method": "fp8", "weight_block_size": [8, 8]})
    return path


QUANTIZERS = {
    "gpt_oss": quantize_to_mxfp4,
    "llama": quantize_to_fp8,
    "qwen3_moe": quantize_to_fp8,
    "mistral3": quantize_to_fp8,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", QUANTIZERS)
def test_quantised_weights_equal_those_that_transformers_dequantises(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    base = save_tiny_model(family, tmp_path / "plain", dtype, hidden_size=64, intermediate_size=64)
    path = QUANTIZERS[family](base, tmp_path / "quantised")
    model = load(path, dtype)
    expected = read_text_weights(model, path, dtype)
    for target in find_targets(model):
        assert torch.equal(target.tensor, expected[target.name]), target.name
    export_merged(model, path, tmp_path / "out", is_writer=True)
    stored, plain = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", base))
    assert {name: tensor.shape for name, tensor in stored.items()} == {name: t.shape for name, t in plain.items()}
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    exported = read_text_weights(model, tmp_path / "out", dtype)
    assert all(torch.equal(exported[name], tensor) for name, tensor in expected.items())


def test_each_of_two_ranks_dequantises_its_own_part(tmp_path: Path) -> None:
    for family, quantize in QUANTIZERS.items():
        base = save_tiny_model(family, tmp_path / "plain" / family, hidden_size=64, intermediate_size=64)
        quantize(base, tmp_path / family)
    totals = {
        family: sum(tensor.numel() for tensor in load_file(tmp_path / family / "model.safetensors").values())
        for family in QUANTIZERS
    }
    for rank in run_ranks(load_on_rank, 2, tmp_path, list(QUANTIZERS)):
        for family, total in totals.items():
            assert rank[family]["read"] < 0.6 * total, family


def save_and_restore(world: World, folder: Path, out: Path, families: list[str]) -> None:
    """Write sharded models as elastic checkpoints, and read them back; with two files to each, at least."""
    for family in families:
        model = build_sharded(world, folder / family, Counter())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3)
        weights = HFModelWeights(model.architecture, folder / family)
        target = out / family
        if world.is_main:
            target.mkdir(parents=True)
        dist.barrier()
        tensors = {name: parameter.detach() for name, parameter in named_trainable(model).items()}
        weights.write(target, tensors, dist.group.WORLD)  # type: ignore[arg-type]
        dist.barrier()
        expected = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        weights.read_(target, model)
        for name, parameter in model.named_parameters():
            ours: Any = parameter
            assert torch.equal(ours.to_local(), expected[name].to_local()), (family, name)  # type: ignore[operator]


def test_elastic_checkpoints_are_model_directories_of_the_base(bases: Path, tmp_path: Path) -> None:
    families = ["deepseek_v3", "gemma3"]
    run_ranks(save_and_restore, 2, bases, tmp_path, families)
    for family in families:
        before, after = (load_file(path / family / "model.safetensors") for path in (bases, tmp_path))
        assert {name: t.shape for name, t in after.items()} == {name: t.shape for name, t in before.items()}
        model = load(bases / family)
        expected, trained = (read_text_weights(model, path / family) for path in (bases, tmp_path))
        parameters = dict(model.named_parameters())
        for name, tensor in expected.items():
            assert torch.equal(trained[name], 3 * tensor if name in parameters else tensor), name


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3_5", "gpt_oss", "deepseek_v3"])
def test_adapters_load_in_peft_and_merge_to_the_export(family: str, bases: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = bases / family
    config = AdapterConfig(rank=4, alpha=8.0, dropout=0.0, modules="all-linear")
    model = build_model(read_architecture(base, "transformers"), 64, PrecisionPolicy.uniform(torch.float32))
    apply_lora_(model, config)
    materialize_(model, torch.device("cpu"))
    load_base_(model, base)
    init_adapters_(model, 0)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_b"):
            parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
    export_adapter(model, config, str(base), base, tmp_path / "adapter", is_writer=True)
    export_merged(model, base, tmp_path / "merged", is_writer=True)
    loaded = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(loaded, tmp_path / "adapter")
    untrained = [name for name, p in adapted.named_parameters() if "lora_B" in name and not p.any()]
    assert not untrained, untrained[:3]
    merged = read_text_weights(model, tmp_path / "merged")
    ours = dict(iter_merged(model))
    for target in find_targets(model):
        assert torch.equal(merged[target.name], ours[target.hf_name]), target.name
    tokens = torch.arange(3, 20)[None]
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert torch.allclose(adapted(tokens).logits, reference(tokens).logits, atol=1e-4, rtol=1e-4)
