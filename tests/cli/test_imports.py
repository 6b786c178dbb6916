"""Help and wrong input are answered before the slow imports; benchmarks/startup.py measures the time."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT

SLOW = ("torch", "transformers", "datasets")

# Runs each command in a fork of a process that has imported the command line alone; prints for each the exit code, the
# slow modules that it imported, and its output.
FORKS = """
import json, os, runpy, sys, tempfile
import fctune.cli
slow, commands = json.load(sys.stdin)
answers = []
for module, *arguments in commands:
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as imported:
        if (child := os.fork()) == 0:
            for stream in (1, 2):
                os.dup2(output.fileno(), stream)
            code, sys.argv = 70, [module, *arguments]
            try:
                runpy.run_module(module + ".__main__" * (module == "fctune.cli"), run_name="__main__")
            except SystemExit as end:
                code = end.code or 0
            except BaseException:
                import traceback
                traceback.print_exc()
            imported.write(json.dumps([name for name in slow if name in sys.modules]).encode())
            for file in (imported, sys.stdout, sys.stderr):
                file.flush()
            os._exit(code)
        _, status = os.waitpid(child, 0)
        output.seek(0), imported.seek(0)
        found = json.loads(imported.read() or '["killed"]')
        answers.append((os.waitstatus_to_exitcode(status), found, output.read().decode()))
print(json.dumps(answers))
"""

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


@pytest.mark.parametrize("config", ["llama3_1_8b_lora", pytest.param("qwen2_7b_lora", marks=pytest.mark.thorough)])
def test_a_plan_imports_no_library_that_builds_or_compiles_models(config: str) -> None:
    slow = ("torchtune", "torchao", "transformers", "datasets", "torch._dynamo", "torch._inductor")
    code = (
        f"import sys; from fctune.cli import main; code = main(['plan', {config!r}]);"
        f" print('IMPORTED', code, [m for m in {slow} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["IMPORTED 0 []"], done.stderr


def test_help_and_wrong_input_are_answered_without_slow_imports() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKS],
        input=json.dumps([SLOW, COMMANDS]),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    assert len(answers) == len(COMMANDS)
    for command, (code, imported, output) in zip(COMMANDS, answers, strict=True):
        assert code == (0 if "--help" in command else 2), (command, output)
        assert "Traceback" not in output, (command, output)
        assert output, command
        assert imported == [], command
