"""Help and wrong input are answered before the slow imports; benchmarks/startup.py measures the time."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import ROOT

SLOW = ("torch", "transformers", "datasets")
REPORT = f"import atexit, sys; atexit.register(lambda: print('IMPORTED', [m for m in {SLOW} if m in sys.modules]))"

COMMANDS = [
    ("fctune.cli", "--help"),
    *(
        ("fctune.cli", *words.split(), "--help")
        for words in (
            "train",
            "sweep",
            "config ls",
            "config cp",
            "config schema",
            "config check",
            "config show",
            "data check",
            "data show",
            "data prepare",
            "data synthetic",
            "plan",
            "preflight",
            "eval",
            "compare",
            "validate",
            "throughput",
            "parser-accuracy",
            "score bfcl",
            "score calls",
            "report",
            "watch",
            "acceptance report",
            "acceptance compare",
            "push",
            "export",
            "serve",
        )
    ),
    *((f"eval.{name}", "--help") for name in ("tool_calls", "compare", "validate", "throughput", "serving")),
    ("fctune.cli", "train", "no/such.yaml"),
    ("fctune.cli", "train", "tiny_lora", "optimizer.lrr=1"),
    ("fctune.cli", "train", "tiny_lora", "adapter.modules=[q_prj]"),
    ("fctune.cli", "config", "check", "tiny_lora", "epochs=0"),
    ("fctune.cli", "plan", "tiny_lora", "epoch=1"),
    ("fctune.cli", "preflight", "tiny_lora", "epoch=1"),
    ("fctune.cli", "data", "prepare", "tiny_lora", "data.sources.0.path=no/such.jsonl"),
    ("fctune.cli", "data", "check", "no/such.jsonl"),
    ("fctune.cli", "data", "show", "no/such.jsonl", "--tokenizer", "fctune/assets/tiny_base"),
    ("fctune.cli", "report", "no/such"),
    ("fctune.cli", "watch", "no/such"),
    ("fctune.cli", "sweep", "no/such"),
    ("fctune.cli", "eval", "--model", "no/such", "--suite", "smoke"),
    ("fctune.cli", "eval", "--model", "fctune/assets/tiny_base", "--suite", "no_such"),
    ("fctune.cli", "compare", "no/such", "no/such"),
    ("fctune.cli", "validate", "no/such"),
    ("fctune.cli", "throughput", "--model", "no/such"),
    ("fctune.cli", "parser-accuracy", "no/such"),
    ("eval.tool_calls", "--model", "no/such", "--suite", "smoke"),
]


@pytest.mark.parametrize("config", ["llama3_1_8b_lora", "qwen2_7b_lora"])
def test_a_plan_imports_no_library_that_builds_or_compiles_models(config: str) -> None:
    slow = ("torchtune", "torchao", "transformers", "datasets", "torch._dynamo", "torch._inductor")
    code = (
        f"import sys; from fctune.cli import main; code = main(['plan', {config!r}]);"
        f" print('IMPORTED', code, [m for m in {slow} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["IMPORTED 0 []"], done.stderr


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_and_wrong_input_are_answered_without_slow_imports(command: tuple[str, ...]) -> None:
    module, *arguments = command
    code = (
        f"{REPORT}; import runpy; sys.argv = {[module, *arguments]}; runpy.run_module({module!r}, run_name='__main__')"
    )
    code = code.replace("runpy.run_module('fctune.cli'", "runpy.run_module('fctune.cli.__main__'")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == (0 if "--help" in arguments else 2), done.stderr
    assert "Traceback" not in done.stderr
    assert "IMPORTED []" in done.stdout
