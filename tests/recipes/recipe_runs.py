"""Small runs of the recipes: on ranks of this machine, or under the launcher."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from fctune.distributed import World
from fctune.training.entry import run_recipe
from recipes.full_fc_distributed import FullFunctionCallingRecipe
from recipes.lora_dpo_distributed import LoRAPreferenceRecipe
from recipes.lora_fc_distributed import LoRAFunctionCallingRecipe
from recipes.lora_grpo_distributed import LoRAPolicyRecipe
from tests.conftest import ROOT
from tests.ranks import run_ranks

Kind = Literal["lora", "full", "dpo", "grpo"]

RECIPES: dict[Kind, Any] = {
    "lora": LoRAFunctionCallingRecipe,
    "full": FullFunctionCallingRecipe,
    "dpo": LoRAPreferenceRecipe,
    "grpo": LoRAPolicyRecipe,
}
CONFIGS: dict[Kind, str] = {kind: str(ROOT / "configs" / f"tiny_{kind}.yaml") for kind in RECIPES}


def arguments_for(output: Path, *overrides: str, kind: Kind = "lora") -> list[str]:
    """Command line of a run of two steps in ``output / "run"``."""
    base = ["data.sources.0.path=synthetic:train:24:1", "data.validation_share=0.2", "global_batch_size=8"]
    base += ["data.packed=false", f"micro_batch_size={4 if kind == 'lora' else 2}", "max_steps=2"]
    return ["--config", CONFIGS[kind], f"output_dir={output / 'run'}", *base, *overrides]


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


def check_single_report(
    argv: list[str], words: str, kind: Kind = "lora", run: Callable[..., dict[str, Any]] = run_kind_on_rank
) -> None:
    """Check that two ranks exit with code 2, and that rank 0 alone reports ``words``, without a traceback."""
    results = run_ranks(run, 2, argv, kind)
    assert [r["code"] for r in results] == [2, 2], results
    assert words in results[0]["err"], results[0]["err"]
    assert "Traceback" not in results[0]["err"]
    assert results[1]["err"] == ""


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
