"""Fixtures that several test directories share: small Hugging Face models, and rows."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import recipes
from fctune.tasks.benchmarks.bfcl.cases import SIMULATORS
from tests import warm_interpreter

# Importing recipes keeps the working directory off the import path of all children, as runs need it. Tests start
# children in the repository's root that import from there.
assert recipes
os.environ.pop("PYTHONSAFEPATH", None)

# Deterministic examples by default; HYPOTHESIS_PROFILE=random explores further. An example may take any time, as the
# processors may be busy.
slowness = [HealthCheck.too_slow]
settings.register_profile("same", derandomize=True, deadline=None, suppress_health_check=slowness)
settings.register_profile("random", derandomize=False, deadline=None, suppress_health_check=slowness)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

ROOT = Path(__file__).resolve().parents[1]
TINY_BASE = ROOT / "fctune" / "assets" / "tiny_base"
REAL_DATA = ROOT.parent / "shared" / "data"
NOT_BY_DEFAULT = ("slow", "thorough", "gpu", "slurm", "serving")  # the marks that -m leaves out in pyproject.toml


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test a cache of its own, and its subprocesses."""
    monkeypatch.setenv("FCTUNE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Undo that a command which a test interrupts ignores Ctrl-C from then on, as the commands of later tests would."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the workers of pytest-xdist too, which share the processors
    # Otherwise each worker would rewrite the tests' assertions again, and each command that they start compile fctune.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    gc.disable()  # until the tests are collected: what they import stays
    os.environ["FCTUNE_CACHE"] = tempfile.mkdtemp(prefix="fctune-tests-")  # of fixtures that tests share
    # A shell starts background jobs with Ctrl-C ignored, and the commands that tests start would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        warm_interpreter.start()  # while the workers collect


def pytest_unconfigure() -> None:
    warm_interpreter.stop()


@pytest.hookimpl(tryfirst=True)  # before -m selects by the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases left out of a sample as thorough, and skip tests of real rows if ../shared/data is missing."""
    cases: dict[tuple[object, int], list[pytest.Item]] = {}
    for item in items:
        sample = item.get_closest_marker("sample")
        if sample and not any(item.get_closest_marker(name) for name in NOT_BY_DEFAULT):
            cases.setdefault((getattr(item, "function", item), sample.args[0]), []).append(item)
    for (_, count), group in cases.items():
        step = max(1.0, (len(group) - 1) / max(1, count - 1))  # the first, the last, and others evenly between
        kept = {round(number * step) for number in range(count)}
        for number, item in enumerate(group):
            if number not in kept:
                item.add_marker(pytest.mark.thorough)
    if not REAL_DATA.is_dir():
        for item in items:
            if item.get_closest_marker("real_data"):
                item.add_marker(pytest.mark.skip(reason="../shared/data is not here"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave what was imported out of garbage collections, and start the server of ranks if several may need it."""
    gc.collect()
    gc.freeze()
    gc.enable()
    # nohup ignores hang-ups, which the commands that tests start would inherit; a handler is not inherited. Not in
    # pytest_configure: the workers of pytest-xdist, which run this hook themselves, are to inherit it.
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)
    if not session.config.option.collectonly and (ranks := sys.modules.get("tests.ranks")):
        ranks.start_server()


@pytest.fixture(scope="session")
def tiny_base() -> Path:
    """Path of the demo's model directory."""
    return TINY_BASE


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Create model directories with random weights: ``make_model("llama" | "qwen2", **config)``, cached."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    made: dict[str, Path] = {}

    def make(family: str = "llama", **changes: object) -> Path:
        key = json.dumps([family, changes], sort_keys=True)
        if key not in made:
            vocab_size = json.loads((TINY_BASE / "config.json").read_text())["vocab_size"]
            sizes = {
                "vocab_size": vocab_size,
                "hidden_size": 64,
                "intermediate_size": 96,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 2048,
                "tie_word_embeddings": False,
            }
            scaled = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            scaled |= {"original_max_position_embeddings": 8192, "rope_theta": 500_000.0}
            torch.manual_seed(0)
            if family == "llama":
                model = LlamaForCausalLM(LlamaConfig(**({"rope_parameters": scaled} | sizes | changes)))
            else:
                model = Qwen2ForCausalLM(Qwen2Config(**(sizes | changes)))
                for name, parameter in model.named_parameters():
                    if name.endswith("bias"):  # initialised to zero, which would hide a bias that is dropped
                        torch.nn.init.normal_(parameter, std=0.1)
            path = tmp_path_factory.mktemp(family)
            model.save_pretrained(path)
            for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
                if (TINY_BASE / file).is_file():
                    shutil.copyfile(TINY_BASE / file, path / file)
            made[key] = path
        return made[key]

    return make


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., Path]:
    """Write rows to a JSONL file in the test's directory."""

    def write(rows: list[object], name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


@pytest.fixture
def without_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the simulated classes of the bfcl-eval wheel impossible to import."""
    package = "bfcl_eval.eval_checker.multi_turn_eval.func_source_code"
    for module in SIMULATORS.values():
        monkeypatch.setitem(sys.modules, f"{package}.{module}", None)


def run_with_closed_pipe(*arguments: str) -> int:
    """Run ``fctune`` with its output closed, check that it prints no error, and return its exit code."""
    command = [warm_interpreter.warm_python(), "-m", "fctune.cli", *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
    return process.returncode
