"""A config's own callbacks are called in training, if the user allows their code."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fctune.base.errors import ConfigError
from fctune.config.components import ALLOW_COMPONENTS
from fctune.config.loading import load_config
from fctune.config.schema import RunConfig
from fctune.training.callbacks.base import make_callbacks
from tests.conftest import ROOT
from tests.page_blocks import list_blocks
from tests.ranks import run_ranks
from tests.recipes.recipe_runs import arguments_for, run_on_rank

PACKAGE = """
from pathlib import Path
import torch
from fctune.training.callbacks.base import Callback

class WeightNorms(Callback):
    def __init__(self, log, every=1):
        self.log, self.every = Path(log), every

    def on_start(self, run):
        self.parameters = [p for p in run.model.parameters() if p.requires_grad]
        self.write("start", run.config.seed, run.world.rank)

    def measure(self, step, is_last):
        self.write("measure", step, is_last)
        return {} if step % self.every else {"adapter_norm": float(sum(p.norm() for p in self.parameters))}

    def on_step_end(self, step, is_last):
        return step == 2

    def close(self):
        self.write("close")

    def write(self, *words):
        with self.log.open("a") as file:
            print(*words, file=file)

def not_a_callback():
    pass
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package of callbacks, installed for this process and its children."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "my_callbacks.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv(ALLOW_COMPONENTS, "")
    monkeypatch.chdir(ROOT)
    return "my_callbacks"


def test_a_callback_of_the_config_measures_each_step_and_ends_the_run(package: str, tmp_path: Path) -> None:
    spec = f"{{_component_: {package}.WeightNorms, log: {tmp_path / 'log'}, every: 2}}"
    (on_page,) = list_blocks(ROOT / "docs" / "train.md", "python")
    (tmp_path / "site" / "callbacks_on_page.py").write_text(on_page)
    specs = f"callbacks=[{spec}, {{_component_: callbacks_on_page.WeightNorms, every: 1}}]"
    allowed = ["--allow-component", package, "--allow-component", "callbacks_on_page"]
    argv = [*arguments_for(tmp_path, specs, "max_steps=9"), *allowed]
    result = run_ranks(run_on_rank, 1, argv)[0]
    assert result["code"] == 0, result
    measured = [f"measure {step} False" for step in (1, 2)]
    assert (tmp_path / "log").read_text().splitlines() == ["start 42 0", *measured, "close"]
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert ["adapter_norm" in step for step in steps] == [False, True]
    assert steps[1]["adapter_norm"] > 0
    assert all(step["weight_norm"] > 0 for step in steps)


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("{log: x}", "callbacks.0._component_: missing; write e.g. my_package.MyCallback"),
        (
            "{_component_: WeightNorms}",
            "callbacks.0._component_=WeightNorms: not an import path; expected e.g. my_pack",
        ),
        ("{_component_: os.system}", "If you trust its code, pass --allow-component os.system"),
        ("{_component_: my_callbacks.WeightNorm}", "cannot be imported"),
        (
            "{_component_: my_callbacks.WeightNorms, evry: 3}",
            "callbacks.0.evry: WeightNorms takes no such argument; did",
        ),
    ],
    ids=range(5),
)
def test_a_wrong_callback_is_reported_with_the_config(
    spec: str, problem: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ALLOW_COMPONENTS, package)
    with pytest.raises(ConfigError) as raised:
        load_config("tiny_lora", [f"callbacks=[{spec}]"])
    assert problem in str(raised.value)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("not_a_callback", r"expected a subclass of fctune\.training\.callbacks\.base\.Callback"),
        ("WeightNorms", r"refuses its arguments \(.*missing 1 required positional argument: 'log'\)"),
    ],
)
def test_what_cannot_be_a_callback_ends_the_run_before_it_starts(
    name: str, problem: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ALLOW_COMPONENTS, package)
    config: RunConfig = load_config("tiny_lora", [f"callbacks=[{{_component_: {package}.{name}}}]"])
    with pytest.raises(ConfigError, match=rf"callbacks\.0\._component_={package}\.{name}: {problem}"):
        make_callbacks(config)
