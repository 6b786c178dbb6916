"""Small runs of the recipes: on ranks of this machine, or under the launcher."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch

from fctune.base import distributed
from fctune.base.distributed import World
from fctune.training.entry import run_recipe
from recipes.full_distill_distributed import FullDistillRecipe
from recipes.full_fc_distributed import FullFunctionCallingRecipe
from recipes.lora_distill_distributed import LoRADistillRecipe
from recipes.lora_dpo_distributed import LoRAPreferenceRecipe
from recipes.lora_fc_distributed import LoRAFunctionCallingRecipe
from recipes.lora_grpo_distributed import LoRAPolicyRecipe
from tests.conftest import ROOT, TINY_BASE
from tests.ranks import run_ranks

Kind = Literal["lora", "full", "dpo", "grpo", "distill", "full_distill"]

RECIPES: dict[Kind, Any] = {
    "lora": LoRAFunctionCallingRecipe,
    "full": FullFunctionCallingRecipe,
    "dpo": LoRAPreferenceRecipe,
    "grpo": LoRAPolicyRecipe,
    "distill": LoRADistillRecipe,
    "full_distill": FullDistillRecipe,
}
CONFIGS: dict[Kind, str] = {kind: str(ROOT / "configs" / f"tiny_{kind.removeprefix('full_')}.yaml") for kind in RECIPES}


SMALL_DISTILL = (
    *("distill.cases=synthetic:train:12:1", "distill.answers_per_step=4", "distill.max_new_tokens=8"),
    *("data.seq_len=1024", "optimizer.lr=1e-3", "checkpoint.every=1"),
)


def arguments_for(output: Path, *overrides: str, kind: Kind = "lora") -> list[str]:
    """Command line of a run of two steps in ``output / "run"``, with adapters at few layers.

    The first step of every process plans each sharded tensor's operations, which takes longer than the step itself.
    """
    base = ["data.sources.0.path=synthetic:train:24:1", "data.validation_share=0.2", "global_batch_size=8"]
    base += ["data.packed=false", f"micro_batch_size={4 if kind == 'lora' else 2}", "max_steps=2"]
    base += [] if kind == "full" else ["adapter.modules=[q_proj,v_proj]"]
    return ["--config", CONFIGS[kind], f"output_dir={output / 'run'}", *base, *overrides]


def distill_arguments(folder: Path, *overrides: str) -> list[str]:
    """Return the command line of a small run with the page's config."""
    page = (ROOT / "docs" / "reference" / "distillation.md").read_text()
    (snippet,) = re.findall(r'```yaml title="distill.yaml"\n(.*?)```', page, re.DOTALL)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "distill.yaml").write_text(snippet)
    return ["--config", str(folder / "distill.yaml"), f"output_dir={folder / 'run'}", *SMALL_DISTILL, *overrides]


def write_teacher(path: Path) -> Path:
    """Write a model with the tiny base's tokenizer and other weights; returns its directory."""
    from transformers import AutoModelForCausalLM

    shutil.copytree(TINY_BASE, path)
    model = AutoModelForCausalLM.from_pretrained(TINY_BASE)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.03)
    model.save_pretrained(path)
    return path


def run_on_rank(world: World, argv: list[str], recipe: Any = LoRAFunctionCallingRecipe) -> dict[str, Any]:
    """Run a recipe on this rank; returns its exit code and output."""
    os.chdir(ROOT)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run_recipe(recipe, argv)
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


def run_kind_on_rank(world: World, argv: list[str], kind: Kind) -> dict[str, Any]:
    """Run the recipe of a kind on this rank; returns its exit code and output."""
    return run_on_rank(world, argv, RECIPES[kind])


def run_in_turn(
    world: World, runs: list[tuple[list[str], Kind]], run: Callable[..., dict[str, Any]] = run_kind_on_rank
) -> list[dict[str, Any]]:
    """Run recipes one after another in one process group; returns each one's exit code and output on this rank."""
    with patch.object(distributed, "shutdown_distributed"):
        return [run(world, argv, kind) for argv, kind in runs]


def check_single_report(
    argv: list[str], words: str, kind: Kind = "lora", run: Callable[..., dict[str, Any]] = run_kind_on_rank
) -> None:
    """Check that two ranks exit with code 2, and that rank 0 alone reports ``words``, without a traceback."""
    check_single_reports([(argv, words, kind)], run=run)


def check_single_reports(
    cases: list[tuple[list[str], str, Kind]],
    world_size: int = 2,
    run: Callable[..., dict[str, Any]] = run_kind_on_rank,
) -> None:
    """Check that all ranks exit with code 2 for each command line, and that rank 0 alone reports its words."""
    ranks = run_ranks(run_in_turn, world_size, [(argv, kind) for argv, _, kind in cases], run)
    assert [len(results) for results in ranks] == [len(cases)] * world_size
    for (argv, words, _), first, *others in zip(cases, *ranks, strict=True):
        assert first["code"] == 2, (argv, first)
        assert words in first["err"], (argv, first["err"])
        assert "Traceback" not in first["err"], (argv, first["err"])
        assert [(other["code"], other["err"]) for other in others] == [(2, "")] * (world_size - 1), argv


def tune_run(*arguments: str, timeout_s: float = 300, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``tune run`` in the repository's root, as a user does."""
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")} | environment
    return subprocess.run(
        [str(Path(sys.executable).parent / "tune"), "run", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=env | {"OMP_NUM_THREADS": "1"},
        timeout=timeout_s,
        check=False,
    )
