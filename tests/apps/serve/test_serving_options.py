"""Options of vLLM's server, checked against the call format of the model's chat template."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from benchmarks.templates import SPECIAL, find_templates
from fctune.apps.serve.server import find_host, require_agreement
from fctune.base.errors import ConfigError
from fctune.calls.formats.registry import detect_format
from fctune.calls.server_parsers import find_server_parsers, write_server_parsers
from fctune.cli import main
from fctune.config.chat_templates import read_chat_template
from fctune.data.chat_template import ChatTemplate
from fctune.engines.vllm_options import server_options
from fctune.models.export import Prompting, copy_companions
from tests.thinking_templates import HYBRID, READS, write_thinking_model


def add_tokens(path: Path, *tokens: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.add_tokens(list(tokens))
    tokenizer.save_pretrained(path)


def test_the_parser_matches_the_call_format_of_the_chat_template(tiny_base: Path) -> None:
    options = server_options(str(tiny_base))
    call_format = detect_format(ChatTemplate(tiny_base).source)
    assert options[options.index("--tool-call-parser") + 1] == call_format.vllm_parser
    assert "--enable-auto-tool-choice" in options
    assert options[options.index("--served-model-name") + 1] == "tiny_base"


def test_a_model_that_reasons_is_served_with_the_parser_of_its_reasoning(tiny_base: Path, tmp_path: Path) -> None:
    assert "--reasoning-parser" not in server_options(str(tiny_base))
    path = write_thinking_model(tiny_base, tmp_path / "hybrid", HYBRID)
    options = server_options(str(path))
    assert options[options.index("--reasoning-parser") + 1] == "qwen3"
    assert options[options.index("--tool-call-parser") + 1] == "hermes"


@pytest.mark.parametrize(
    ("block", "template_args", "has_reasoning", "parser"),
    [
        (READS, {}, True, "deepseek_r1"),
        (READS, {}, None, "deepseek_r1"),
        # vLLM takes an answer without any mark of reasoning for reasoning that has not ended, and sends no content.
        (READS, {}, False, None),
        (HYBRID, {}, False, "qwen3"),  # its answers start with an empty block
        (HYBRID, {"enable_thinking": False}, False, "qwen3"),  # its prompts end with one
    ],
)
def test_an_export_trained_without_reasoning_is_served_without_its_parser(
    block: str,
    template_args: dict[str, bool],
    has_reasoning: bool | None,
    parser: str | None,
    tiny_base: Path,
    tmp_path: Path,
) -> None:
    block = block.replace("KEY", "reasoning_content")
    base, out = write_thinking_model(tiny_base, tmp_path / "base", block), tmp_path / "out"
    out.mkdir()
    add_tokens(base, "<think>", "</think>")
    copy_companions(base, out, Prompting(template_args=template_args, has_reasoning=has_reasoning))
    shutil.copyfile(base / "config.json", out / "config.json")
    shutil.copyfile(base / "model.safetensors", out / "model.safetensors")
    options = server_options(str(out))
    assert (
        options[options.index("--reasoning-parser") + 1 :][:1] == [parser]
        if parser
        else "--reasoning-parser" not in options
    )


def test_a_damaged_record_of_parsers_is_named(tiny_base: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_base, tmp_path / "model")
    (tmp_path / "model" / "server_parsers.json").write_text('{"vllm": []}')
    with pytest.raises(ConfigError, match=r"server_parsers.json: damaged"):
        server_options(str(tmp_path / "model"))


def test_recorded_parsers_do_not_outlive_the_template_that_they_are_for(tiny_base: Path, tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(tiny_base, path)
    write_server_parsers(path, ChatTemplate(path), {}, has_reasoning=False)

    def served() -> str:
        options = server_options(str(path))
        return options[options.index("--tool-call-parser") + 1]

    before = served()
    (path / "chat_template.jinja").write_text(read_chat_template("pythonic"), encoding="utf-8")
    assert (before, served()) == ("hermes", "pythonic")


def test_a_run_is_served_from_its_merged_export_under_its_own_name(tiny_base: Path, tmp_path: Path) -> None:
    run = tmp_path / "mine"
    (run / "export").mkdir(parents=True)
    (run / "export" / "merged").symlink_to(tiny_base)
    options = server_options(str(run))
    assert options[options.index("--model") + 1] == str(run / "export" / "merged")
    assert options[options.index("--served-model-name") + 1] == "mine"


def make_adapter(folder: Path, base: Path, **config: Any) -> str:
    folder.mkdir()
    given = {"base_model_name_or_path": str(base), "r": 12} | config
    (folder / "adapter_config.json").write_text(json.dumps(given))
    return str(folder)


def test_a_missing_model_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such directory"):
        server_options(str(tmp_path / "none"))


def test_an_adapter_is_served_on_its_base_within_the_ranks_that_vllm_allows(tiny_base: Path, tmp_path: Path) -> None:
    options = server_options(make_adapter(tmp_path / "mine", tiny_base, rank_pattern={"lm_head": 20}))
    assert options[options.index("--model") + 1] == str(tiny_base)
    assert options[options.index("--max-lora-rank") + 1] == "32"
    assert options[options.index("--lora-modules") + 1] == f"mine={tmp_path / 'mine'}"
    assert "--tokenizer" not in options
    shutil.copyfile(tiny_base / "tokenizer.json", tmp_path / "mine" / "tokenizer.json")
    shutil.copyfile(tiny_base / "tokenizer_config.json", tmp_path / "mine" / "tokenizer_config.json")
    options = server_options(str(tmp_path / "mine"))
    assert options[options.index("--tokenizer") + 1] == str(tmp_path / "mine")


@pytest.mark.parametrize("name", ["lr=1e-4", "a,b", "lr=1e-4,r=8", 'it\'s mine, "all" of it'])
def test_an_adapter_of_any_name_is_printed_as_vllm_reads_it(
    name: str, tiny_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = make_adapter(tmp_path / name, tiny_base)
    assert main(["serve", adapter, "--print"]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert json.loads(words[words.index("--lora-modules") + 1]) == {"name": name, "path": adapter}
    assert main(["serve", adapter, "--name", "mine", "--print"]) == 0
    words = shlex.split(capsys.readouterr().out)
    module = words[words.index("--lora-modules") + 1]
    assert module == f"mine={adapter}" if not {",", "="} & set(name) else json.loads(module)["path"] == adapter


def test_the_command_that_is_announced_names_an_adapter_next_to_its_base(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def announce(command: list[str], port: int, announce: Callable[[float], None], **_: Any) -> bool:
        announce(1.0)
        return False

    monkeypatch.setattr("fctune.apps.serve.server.run_server", announce)
    monkeypatch.setattr("fctune.cli.serve.require_vllm", lambda python: None)
    adapter, url = make_adapter(tmp_path / "my run", tiny_base), "http://127.0.0.1:8000/v1"
    for words, command in (
        ([adapter], f"fctune chat {url} --served-model 'my run'"),
        ([adapter, "--name", "mine"], f"fctune chat {url} --served-model mine"),
        ([str(tiny_base)], f"fctune chat {url}"),
    ):
        assert main(["serve", *words]) == 0
        assert f"({command}; Ctrl-C ends it)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"use_dora": True}, "cannot load DoRA's magnitudes"),
        ({"trainable_token_indices": [1]}, "rows of the embedding"),
        ({"target_parameters": ["experts.down_proj"]}, "adapter on experts"),
        ({"r": 1024}, "vLLM loads adapters up to rank 512, not 1024"),
        ({"r": None}, "adapter_config.json: damaged"),
    ],
    ids=["dora", "tokens", "experts", "rank", "damaged"],
)
def test_an_adapter_that_vllm_cannot_load_is_refused_with_the_remedy(
    config: dict[str, Any], reason: str, tiny_base: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=reason) as found:
        server_options(make_adapter(tmp_path / "adapter", tiny_base, **config))
    assert "damaged" in str(found.value) or "export/merged" in str(found.value)


@pytest.mark.parametrize(
    ("further", "reason"),
    [
        (["--tool-call-parser", "llama3_json"], "llama3_json cannot read what this model writes, which needs hermes"),
        (["--tool_call_parser=llama3_json"], "llama3_json cannot read"),
        (["--reasoning-parser", "qwen3"], "qwen3 cannot read what this model writes, which needs none"),
        (["--max-lora-rank", "8"], "--max-lora-rank 8 is too low for the adapter, which needs 16"),
        (["--max-lora-rank", "many"], "--vllm: argument --max-lora-rank"),
        (["--port", "9000"], "--vllm: --port is set by fctune serve. Use its own --port."),
        (["--model=x"], "--model is set by fctune serve. Name the model as its PATH."),
        (["--tokenizer", "x"], "--tokenizer is set by fctune serve. It takes the tokenizer from"),
        (["--served-model-name", "x"], "--served-model-name is set by fctune serve. Use its own --name."),
        (["--default-chat-template-kwargs", "{}"], "is set by fctune serve. Use its own --template-args."),
        (["--chat-template", "x.jinja"], "replaces the template .* Write it to chat_template.jinja in the model"),
        (["--lora-modules", "a=b", "c=d"], "--lora-modules replaces the adapter of PATH"),
        (["--uds", "/tmp/x"], "--uds makes a server that fctune serve cannot reach over HTTP. Leave it out."),
        (["--ssl-keyfile", "k", "--ssl_certfile", "c"], r"--ssl-keyfile makes .*\n--vllm: --ssl-certfile makes"),
        (["--grpc"], "--grpc makes a server"),
    ],
)
def test_options_that_undo_what_the_model_needs_are_refused(
    further: list[str], reason: str, tiny_base: Path, tmp_path: Path
) -> None:
    options = server_options(make_adapter(tmp_path / "adapter", tiny_base))
    require_agreement(options, ["--max-model-len", "1024", "--tool-call-parser", "hermes", "--max-lora-rank", "32"])
    with pytest.raises(ConfigError, match=reason):
        require_agreement(options, further)


def test_a_server_for_adapters_may_start_with_others_and_without_parsers_with_any_template(tiny_base: Path) -> None:
    require_agreement(server_options(str(tiny_base), adapter_rank=8), ["--lora-modules", "a=b"])
    options = ["--model", "x", "--enable-lora", "--max-lora-rank", "8"]
    require_agreement(options, ["--chat-template", "x.jinja", "--reasoning-parser", "qwen3"])


@pytest.mark.parametrize(
    ("further", "host"),
    [
        ([], "127.0.0.1"),
        (["--host", "127.0.0.1", "--seed", "1"], "127.0.0.1"),
        (["--host=0.0.0.0"], "127.0.0.1"),
        (["--host", "::"], "[::1]"),
        (["--host", "fd00::2"], "[fd00::2]"),
        (["--host", "127.0.0.1", "--host", "10.0.0.1"], "10.0.0.1"),
        (["--host", "localhost"], "localhost"),
    ],
)
def test_a_server_is_asked_at_the_host_where_it_listens(further: list[str], host: str, tiny_base: Path) -> None:
    require_agreement(server_options(str(tiny_base)), further)
    assert find_host(further) == host


def test_a_tokenizer_that_lacks_the_templates_tokens_is_refused(tiny_base: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_base, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    config["chat_template"] = config["chat_template"].replace("start_header_id", "other_header_id")
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"lacks the template's tokens <\|other_header_id\|>"):
        server_options(str(tmp_path / "model"))


def test_the_api_key_is_not_part_of_the_command(tiny_base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(tiny_base), "--print", "--vllm=--max-model-len 1024"]) == 0
    said = capsys.readouterr().out
    assert "vllm.entrypoints.openai.api_server --model" in said
    assert said.strip().endswith("--port 8000 --max-model-len 1024")
    assert "api-key" not in said


def test_a_base_is_served_for_adapters_of_any_version_up_to_a_rank(tiny_base: Path) -> None:
    options = server_options(str(tiny_base), adapter_rank=12)
    assert options[options.index("--max-lora-rank") + 1] == "16"
    assert int(options[options.index("--max-loras") + 1]) >= 2, "an old version answers while the new one is loaded"
    assert "--lora-modules" not in options
    with pytest.raises(ConfigError, match="--adapters 513: expected a rank from 1 to 512"):
        server_options(str(tiny_base), adapter_rank=513)


def test_a_base_served_for_adapters_parses_the_calls_of_its_template(tiny_base: Path, tmp_path: Path) -> None:
    path = write_thinking_model(tiny_base, tmp_path / "hybrid", HYBRID)
    options = server_options(str(path), template_args={"enable_thinking": False}, adapter_rank=8)
    plain = server_options(str(path), template_args={"enable_thinking": False})
    assert options[-len(plain) + 4 :] == plain[4:], "everything after the names of the model"
    assert plain[4:7] == ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    require_agreement(options, ["--tool-call-parser", "hermes"])
    with pytest.raises(ConfigError, match="pythonic cannot read what this model writes, which needs hermes"):
        require_agreement(options, ["--tool-call-parser", "pythonic"])


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (None, "its tokenizer has no chat template"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "its chat template ignores tools"),
        (read_chat_template("llama3"), r"lacks <|python_tag|>, without which vLLM's parser llama3_json does not start"),
    ],
    ids=["none", "no-tools", "no-token"],
)
def test_a_base_whose_calls_vllm_cannot_parse_is_served_for_adapters_without_parsers(
    template: str | None, reason: str, tiny_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(write_model_with_template(tiny_base, tmp_path / "model", template))
    own = "--tool-call-parser hermes --enable-auto-tool-choice"
    assert main(["serve", path, "--adapters", "8", "--print", f"--vllm={own}"]) == 0
    printed = capsys.readouterr()
    assert printed.err.startswith("The server parses no calls, which reinforcement does not need: ")
    assert reason in printed.err
    assert printed.out.count("parser") == own.count("parser")
    with pytest.raises(ConfigError) as found:
        server_options(path)
    assert reason in str(found.value)


def test_a_base_without_a_template_is_refused_with_options_that_exist(tiny_base: Path, tmp_path: Path) -> None:
    path = write_model_with_template(tiny_base, tmp_path / "model", None)
    with pytest.raises(ConfigError, match=r"so it is a base model\. Serve a run's export.* --adapters RANK") as found:
        server_options(str(path))
    assert "--chat-template" not in str(found.value)


def test_the_command_for_adapters_has_the_environment_that_they_need(
    tiny_base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(tiny_base), "--adapters", "8", "--print"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("VLLM_ALLOW_RUNTIME_LORA_UPDATING=True ")
    assert "--enable-lora" in said


def write_model_with_template(tiny_base: Path, path: Path, template: str | None) -> Path:
    shutil.copytree(tiny_base, path)
    config = json.loads((path / "tokenizer_config.json").read_text())
    config.pop("chat_template")
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return path


def test_a_tokenizer_without_the_token_that_vllms_parser_looks_up_is_refused_with_the_remedy(
    tiny_base: Path, tmp_path: Path
) -> None:
    path = write_model_with_template(tiny_base, tmp_path / "model", read_chat_template("llama3"))
    with pytest.raises(
        ConfigError, match=r"lacks <\|python_tag\|>, without which vLLM's parser llama3_json .*add_tokens="
    ):
        server_options(str(path))
    add_tokens(path, "<|python_tag|>")
    assert "llama3_json" in server_options(str(path))


def test_a_tokenizer_without_the_tags_that_vllms_reasoning_parser_looks_up_is_refused(
    tiny_base: Path, tmp_path: Path
) -> None:
    path = write_thinking_model(tiny_base, tmp_path / "model", READS.replace("KEY", "reasoning_content"))
    with pytest.raises(
        ConfigError, match=r"lacks <think>, </think>, without which vLLM's parser deepseek_r1 .*add_tokens="
    ):
        server_options(str(path))


def test_a_model_without_weights_is_refused(tiny_base: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_base, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(ConfigError, match="model: holds no weights"):
        server_options(str(tmp_path / "model"))


@pytest.mark.parametrize("port", ["0", "65536"])
def test_a_port_that_cannot_be_asked_is_refused(port: str, tiny_base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(tiny_base), "--port", port, "--print"]) == 2
    assert capsys.readouterr().err == f"--port {port}: expected 1 to 65535.\n"


@pytest.mark.parametrize("name", ["gptoss", "muse_glimmer"])
def test_channels_are_parsed_of_models_that_do_not_reason_too(name: str, tiny_base: Path, tmp_path: Path) -> None:
    template = next(found.source for found in find_templates() if found.name == name)
    path = write_model_with_template(tiny_base, tmp_path / "model", template)
    add_tokens(path, *SPECIAL.findall(template))
    parsers = find_server_parsers(ChatTemplate(path), has_reasoning=False)
    assert parsers["vllm"]["reasoning_parser"] in ("openai_gptoss", "muse_glimmer")


def test_a_models_name_cannot_become_an_option_of_the_server(tiny_base: Path, tmp_path: Path) -> None:
    named = tmp_path / "--trust-remote-code"
    named.symlink_to(tiny_base)
    assert "tiny_base" in server_options(str(named))  # links are resolved
    copied = shutil.copytree(tiny_base, tmp_path / "x" / "--trust-remote-code")
    with pytest.raises(ConfigError, match="--trust-remote-code: vLLM would read it as an option; pass a --name"):
        server_options(str(copied))
    assert "mine" in server_options(str(copied), "mine")
