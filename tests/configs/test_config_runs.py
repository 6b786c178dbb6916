"""``make configs``: what is run of a config, and on which rows."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from benchmarks.deep_models import place_model
from benchmarks.run_configs import (
    RESULTS,
    ConfigFailure,
    check_graphs,
    digest_config,
    find_rows,
    main,
    write_results,
)
from benchmarks.run_configs import Row as ConfigRow
from benchmarks.warm_python import WarmPython
from fctune.config.loading import load_config
from fctune.config.shipped import list_shipped_configs
from fctune.data.sources import read_source
from fctune.data.stop_tokens import read_eos_ids
from tests.conftest import ROOT

CONFIGS = {path.stem: path for path in list_shipped_configs()}


def test_a_comment_keeps_the_digest_and_a_value_of_an_extended_file_changes_it(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    path = tmp_path / "configs" / "qwen3_8b_lora.yaml"
    digest = digest_config(path)
    path.write_text(f"# Another comment.\n{path.read_text()}")
    assert digest_config(path) == digest
    base = tmp_path / "configs" / "bases" / "hermes_glaive_lora.yaml"
    base.write_text(base.read_text().replace("epochs: 2", "epochs: 3"))
    assert digest_config(path) != digest


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_names_only_data_sets_with_rows_of_their_shape(name: str) -> None:
    if name.startswith("acceptance"):
        return
    for source in load_config(CONFIGS[name]).data.sources:
        find_rows(source.path)


def test_a_data_set_without_rows_fails() -> None:
    with pytest.raises(ConfigFailure, match="no rows in the shape of someone/else"):
        find_rows("hf:someone/else@main")


@pytest.mark.parametrize(("graphs", "is_constant"), [([3, 5, 5], True), ([3, 5, 7], False), ([0, 0], False)])
def test_graphs_may_not_grow_after_the_second_step(graphs: list[int], is_constant: bool) -> None:
    if is_constant:
        check_graphs(graphs)
    else:
        with pytest.raises(ConfigFailure, match="graphs after each step"):
            check_graphs(graphs)


def test_a_model_keeps_the_depth_and_kinds_of_its_config(tmp_path: Path) -> None:
    folder = place_model(tmp_path, "hf:google/gemma-3-270m", ["a text"])
    raw = json.loads((folder / "config.json").read_text())
    assert raw["num_hidden_layers"] == 18
    assert raw["layer_types"].count("full_attention") == 3
    assert raw["query_pre_attn_scalar"] == 256
    assert raw["hidden_size"] < 640
    assert place_model(tmp_path, "hf:google/gemma-3-270m", ["a text"]) == folder


@pytest.mark.parametrize(
    ("name", "file", "stops", "bos"),
    [
        (
            "google/functiongemma-270m-it",
            "generation_config.json",
            {"<eos>", "<end_of_turn>", "<start_function_response>"},
            "<bos>",
        ),
        ("google/gemma-4-E2B-it", "generation_config.json", {"<eos>", "<turn|>", "<|tool_response>"}, "<bos>"),
        (
            "openai/gpt-oss-20b",
            "generation_config.json",
            {"<|return|>", "<|endoftext|>", "<|call|>"},
            "<|startoftext|>",
        ),
        ("HuggingFaceTB/SmolLM3-3B", "generation_config.json", {"<|im_end|>"}, None),
        ("Qwen/Qwen3.5-0.8B", "config.json", {"<|endoftext|>"}, None),  # published without a generation config
    ],
)
def test_a_model_stops_and_begins_with_its_published_tokens(
    name: str, file: str, stops: set[str], bos: str | None, tmp_path: Path
) -> None:
    folder = place_model(tmp_path, f"hf:{name}", ["a text"])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = read_eos_ids(folder, has_fallback=True)
    assert {tokenizer.convert_ids_to_tokens(i) for i in ids} == stops
    assert (folder / "generation_config.json").is_file() == (file == "generation_config.json")
    assert tokenizer.bos_token == bos


@pytest.mark.parametrize("path", sorted((ROOT / "tests" / "configs" / "rows").glob("*.jsonl")), ids=lambda p: p.stem)
def test_all_rows_are_read_but_one_with_a_published_defect(path: Path) -> None:
    defects = [item for item in read_source(str(path)) if not hasattr(item, "messages")]
    assert len(defects) == (0 if "singleturn" in path.stem else 1)


def test_every_shipped_config_ran_as_it_is_shipped() -> None:
    rows = {row["config"]: row for row in json.loads(RESULTS.read_text(encoding="utf-8"))}
    outdated = [name for name, row in rows.items() if row["digest"] != digest_config(CONFIGS[name])]
    assert outdated == [], f"run: make configs ONLY='{' '.join(outdated)}'"
    assert {name: row["failure"] for name, row in rows.items() if row["failure"]} == {}
    assert CONFIGS.keys() == rows.keys()


def test_rows_of_other_configs_are_kept_with_their_runner(tmp_path: Path) -> None:
    path = tmp_path / "configs.json"
    for runner, name in (("a", "tiny_lora"), ("a", "tiny_full"), ("b", "tiny_lora")):
        write_results(path, [ConfigRow(config=name, digest="", runner=runner)])
    rows = {row["config"]: row["runner"] for row in json.loads(path.read_text(encoding="utf-8"))}
    assert rows == {"tiny_full": "a", "tiny_lora": "b"}


def test_a_config_that_cannot_run_fails_the_command_after_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken_lora.yaml"
    broken.write_text(
        (ROOT / "configs" / "tiny_lora.yaml").read_text().replace("path: synthetic:train:", "path: hf:a/b #")
    )
    assert main([str(broken), "--results", str(tmp_path / "results.json"), "--folder", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "broken_lora: no rows in the shape of a/b" in out
    assert out.index("of CPU  result") < out.index("FAILED") < out.index("0 of 1 configs ran")


@pytest.mark.slow  # make test-slow
def test_blocks_that_are_each_compiled_again_fail_the_command(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "from fctune.models import forward_override as module\nmodule._derive = module._derive.__wrapped__\n"
    )
    command = [sys.executable, "-m", "benchmarks.run_configs", "qwen3_4b_lora", "--results", str(tmp_path / "results")]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "qwen3_4b_lora: resumed run: exit code 1: " in done.stdout
    assert "recompile" in done.stdout


# Reports what it sees, and starts itself once more by its interpreter.
PROBE = """
import json, os, subprocess, sys, time
if sys.argv[1] == "sleep":
    time.sleep(60)
print(json.dumps([__name__, sys.argv[1:], os.environ["GIVEN"], os.getcwd(), "fractions" in sys.modules]), flush=True)
if sys.argv[1] == "parent":
    sys.exit(subprocess.run([sys.executable, "-P", "-u", "-m", "warm_probe", "child"]).returncode)
os._exit(7)
"""


@pytest.fixture(scope="module")
def warm() -> Iterator[WarmPython]:
    with tempfile.TemporaryDirectory() as folder:  # a socket's path is at most 108 bytes
        Path(folder, "warm_probe.py").write_text(PROBE)
        path = os.pathsep.join((str(ROOT), folder))
        python = WarmPython(Path(folder), ["fractions"], {**os.environ, "PYTHONPATH": path})
        yield python
        python.close()


def test_a_warm_command_sees_what_a_new_interpreter_would_and_so_do_its_children(
    warm: WarmPython, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    code, cpu_s = warm.run("warm_probe", ["parent"], "probe", {**os.environ, "GIVEN": "yes"}, tmp_path, log, 60.0)
    assert code == 7, log.read_text()
    assert cpu_s > 0
    seen = [json.loads(line) for line in log.read_text().splitlines()]
    assert seen == [["__main__", [role], "yes", str(tmp_path), True] for role in ("parent", "child")]


# Ends by itself, by an exit code, a message, an error and a signal; and sees its arguments, its module and its exit.
CODES = (
    "import sys; print(__name__, sys.argv)",
    "import sys; sys.exit(3)",
    "import sys; sys.exit('no such file')",
    "import atexit; atexit.register(print, 'the end'); 1 / 0",
    "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "import os, sys; print(os.getcwd() in map(os.path.abspath, sys.path))",
)


def test_the_stand_in_runs_code_as_an_interpreter_does(warm: WarmPython, tmp_path: Path) -> None:
    def outcome(python: str, *options: str) -> tuple[int, str, str]:
        command = [python, *options, "word"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout, done.stderr.rpartition("\n  ")[2]

    for code in CODES:
        for options in (("-c", code), ("-P", "-c", code)):
            assert outcome(str(warm.start()), *options) == outcome(sys.executable, *options), options


def test_a_warm_command_is_killed_at_its_limit(warm: WarmPython, tmp_path: Path) -> None:
    with pytest.raises(TimeoutError):
        warm.run("warm_probe", ["sleep"], "slow", dict(os.environ), tmp_path, tmp_path / "log", 0.5)
