"""The evaluation commands: verdicts, files and errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eval import compare, tool_calls
from fctune.base.errors import DataError
from fctune.calls.formats.registry import FORMATS
from fctune.cli.eval_options import parse_eval_arguments
from fctune.data.synthetic import iter_cases
from fctune.engines.local import LocalEngine
from fctune.tasks.benchmarks.bfcl.suite import BfclSuite
from fctune.tasks.evaluation.results import read_rows
from fctune.tasks.evaluation.score_file import score_file
from fctune.tasks.suite_files import load_suite, read_cases
from tests.conftest import ROOT
from tests.engines.fault_server import Handler, serve
from tests.tasks.benchmarks.bfcl.bfcl_wheel import data_dir, needs_wheel

KEY = "sk-secret-of-the-user"


@pytest.fixture
def cases(tmp_path: Path) -> Path:
    path = tmp_path / "cases.jsonl"
    path.write_text("".join(json.dumps(case.to_json()) + "\n" for case in iter_cases(6, 3)))
    return path


def test_each_case_gets_a_verdict_and_the_summary_counts_them(cases: Path, tiny_base: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "answers.jsonl"
    arguments = ["--model", str(tiny_base), "--cases", str(cases), "--out", str(out), "--max-new-tokens", "24"]
    assert tool_calls.main(arguments) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["id"] for row in rows] == [case.id for case in read_cases(cases)]
    summary = json.loads(out.with_suffix(".summary.json").read_text())
    for reading in ("scores", "lenient"):
        overall = summary[reading]["all"]
        assert overall["n"] == 6
        assert sum(overall["verdicts"].values()) == 6
        rate = overall["rates"]["accuracy"]
        assert rate["low"] <= rate["rate"] <= rate["high"]
    assert tool_calls.main([*arguments, "--min-accuracy", "1.01"]) == 1
    assert compare.main([str(out), str(out)]) == 0


def test_the_same_command_again_asks_nothing_and_another_is_refused(
    cases: Path, tiny_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["--model", str(tiny_base), "--cases", str(cases), "--max-new-tokens", "8"]
    assert tool_calls.main(arguments) == 0
    (out,) = (tmp_path / "runs" / "eval").rglob("cases.jsonl")
    before = out.read_bytes()
    monkeypatch.setattr(LocalEngine, "answer", lambda *_: 1 / 0)
    assert tool_calls.main(arguments) == 0
    assert out.read_bytes() == before
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert tool_calls.main([*arguments, "--max-new-tokens", "9"]) == 2
    assert "max_new_tokens: was 8, is now 9" in capsys.readouterr().err
    assert tool_calls.main([*arguments, "--max-new-tokens", "9", "--fresh"]) == 0


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("", "contains no cases"),
        ("{", "not JSON"),
        ('{"messages": 3}', "expected an object with messages"),
        ('{"messages": [{"role": "user", "content": "Hi"}]}', "no expected_calls"),
        ('{"messages": [{"role": "user", "content": "Hi"}], "expected_calls": {}}', "expected a list of calls"),
        ('{"messages": [{"role": "user", "content": "Hi"}], "expected_calls": [{"nam": 1}]}', "1 invalid case"),
        (
            '{"id": 1, "messages": [{"role": "user", "content": "Hi"}], "expected_calls": []}\n' * 2,
            "ids must be unique",
        ),
    ],
)
def test_a_file_that_holds_no_cases_is_named(rows: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "cases.jsonl"
    path.write_text(rows)
    with pytest.raises(DataError, match=words):
        read_cases(path)


def test_an_answer_in_place_of_expected_calls_is_what_is_expected(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    row = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]}], "tools": tools}
    path = tmp_path / "cases.jsonl"
    path.write_text(json.dumps(row))
    (case,) = read_cases(path)
    assert [m.role for m in case.prompt.messages] == ["user"]
    assert [(c.name, c.arguments) for c in case.expected] == [("f", {"a": 1})]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "no/such"], "Pass a model directory"),
        (["--model", "http://127.0.0.1:9"], "Is the server up"),
        (["--cases", "no/such.jsonl"], "no such file"),
        (["--suite", "smok"], "known: bfcl, ifeval, smoke, synthetic, when2call"),
        (["--suite", "smoke", "--categories", "singel"], "it has choice, no_call, parallel, single"),
        (["--format", "hermess"], "did you mean hermes?"),
        (["--adapter", "no/such"], "not an adapter"),
        (["--model", "http://127.0.0.1:9", "--adapter", "a"], "Load the adapter there, and pass the name"),
        (["--max-new-tokens", "999999"], "exceed the model's"),
        (["--out", "/proc/nowhere/x.jsonl"], "cannot be written"),
        (["--html", "/proc/nowhere/x.html"], "cannot be written"),
        (["--config", "no/such.yaml"], "cannot be read"),
    ],
)
def test_wrong_input_is_reported_in_one_sentence(
    arguments: list[str],
    words: str,
    cases: Path,
    tiny_base: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    base = ["--model", str(tiny_base), "--cases", str(cases), "--max-new-tokens", "4"]
    assert tool_calls.main([*base, *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_model_without_a_template_is_reported(
    cases: Path, tiny_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import shutil

    model = tmp_path / "model"
    shutil.copytree(tiny_base, model)
    config = json.loads((model / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    (model / "chat_template.jinja").unlink(missing_ok=True)
    assert tool_calls.main(["--model", str(model), "--cases", str(cases), "--out", str(tmp_path / "x.jsonl")]) == 2
    assert "has no chat template" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("[1]", "expected a mapping of options"),
        ("modl: x", "modl: unknown option"),
        ("a: [", "cannot be read"),
        ("a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{f'*a{n - 1}, ' * 9}]\n" for n in range(1, 9)), "aliases expand"),
    ],
)
def test_a_config_file_without_options_is_reported(
    config: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "eval.yaml"
    path.write_text(config)
    assert tool_calls.main(["--config", str(path)]) == 2
    assert words in capsys.readouterr().err


def test_a_config_stands_for_its_options_and_the_command_line_wins(tmp_path: Path) -> None:
    path = tmp_path / "eval.yaml"
    path.write_text(
        "model: m\nsuite: smoke\nmax_new_tokens: 8\nfresh: true\nlimit: null\ncategories: [single, choice]\n"
        "request: {tool_choice: none}\n"
    )
    read = parse_eval_arguments(["--config", str(path), "--max-new-tokens", "9"])
    assert (read.model, read.suite, read.max_new_tokens, read.fresh, read.limit) == ("m", "smoke", 9, True, None)
    assert (read.categories, read.request) == (["single", "choice"], {"tool_choice": "none"})


@pytest.mark.parametrize("request_body", ["[1]", "{"])
def test_a_request_must_be_a_json_object(request_body: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        tool_calls.main(["--model", "m", "--suite", "smoke", "--request", request_body])
    assert "argument --request: invalid" in capsys.readouterr().err


def oracle(handler: Handler, number: int, body: dict[str, Any], is_native: bool, wrong: str = "") -> None:
    """A server whose model is right, except for the case ``wrong``."""
    suite = load_suite(ROOT / "eval" / "suites" / "smoke.yaml")
    case = next(c for c in suite.cases if c.prompt.messages[-1].content == body["messages"][-1]["content"])
    if not case.expected or case.id == wrong:
        handler.say("No.")
    elif is_native:
        functions = [{"name": call.name, "arguments": json.dumps(call.arguments)} for call in case.expected]
        handler.say(None, tool_calls=[{"id": "x", "type": "function", "function": f} for f in functions])
    else:
        handler.say(FORMATS["hermes"].render(case.expected))


@pytest.mark.parametrize("is_native", [True, False], ids=["calls", "text"])
def test_a_server_is_read_by_its_own_calls_or_by_its_text(is_native: bool, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with serve(lambda h, n, b: oracle(h, n, b, is_native, wrong="meeting")) as log:
        how = [] if is_native else ["--format", "hermes"]
        assert tool_calls.main(["--model", log.url, "--suite", "smoke", "--out", str(out), *how]) == 0
    assert [row["verdict"] for row in read_rows(out)] == ["correct", "missed_call", "correct", "correct"]
    summary = json.loads(out.with_suffix(".summary.json").read_text())
    assert summary["settings"]["format"] == ("served" if is_native else "hermes")
    assert summary["settings"]["served_model"] == "tiny"


def test_calls_that_a_server_leaves_in_the_text_are_pointed_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serve(lambda h, n, b: oracle(h, n, b, is_native=False)) as log:
        assert tool_calls.main(["--model", log.url, "--suite", "smoke", "--out", str(tmp_path / "o.jsonl")]) == 0
    said = capsys.readouterr().out.replace("\n", " ")
    assert "can be parsed as calls in ernie45, hermes: pass that of the model's template with --format" in said


def test_calls_that_a_server_sends_as_text_among_others_are_counted_as_they_are_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A broken one, and one that is well written, as clients get neither."""
    texts = ['{"name": "get_weather", "arguments": {"ci', '{"name": "get_weather", "arguments": {"city": "Oslo"}}']

    def behave(handler: Handler, number: int, body: dict[str, Any]) -> None:
        if number < len(texts):
            handler.say(f"<tool_call>\n{texts[number]}</tool_call>")
        else:
            oracle(handler, number, body, is_native=True)

    with serve(behave) as log:
        words = ["--model", log.url, "--suite", "smoke", "--out", str(tmp_path / "o.jsonl"), "--concurrency", "1"]
        assert tool_calls.main(words) == 0
    verdicts = sorted(row["verdict"] for row in read_rows(tmp_path / "o.jsonl"))
    assert verdicts == ["correct", "correct", "malformed", "malformed"]
    said = capsys.readouterr().out.replace("\n", " ")
    assert "2 answers hold a call that the server sent as content: judged malformed" in said


def test_the_key_comes_from_the_environment_and_is_in_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FCTUNE_API_KEY", KEY)

    def behave(handler: Handler, number: int, body: dict[str, Any]) -> None:
        assert handler.headers["Authorization"] == f"Bearer {KEY}"
        if number == 0:
            handler.send(400, f"your key {handler.headers['Authorization']} is fine, your prompt is not")
        else:
            oracle(handler, number, body, is_native=True)

    with serve(behave) as log:
        arguments = ["--model", log.url, "--suite", "smoke", "--out", str(tmp_path / "o.jsonl")]
        assert tool_calls.main([*arguments, "--concurrency", "1", "--html", str(tmp_path / "o.html")]) == 1
    printed = capsys.readouterr()
    assert "1 of 4 cases have no answer and count as wrong" in printed.out
    assert "your key Bearer *** is fine" in (tmp_path / "o.jsonl").read_text()
    written = [file.read_text() for file in tmp_path.iterdir()] + [printed.out, printed.err]
    assert len(written) == 6
    assert not any(KEY in text for text in written)


def test_a_refused_key_ends_the_run_with_what_to_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FCTUNE_API_KEY", raising=False)
    with serve(lambda handler, *_: handler.send(401, '{"error": {"message": "no key"}}')) as log:
        assert tool_calls.main(["--model", log.url, "--suite", "smoke", "--out", str(tmp_path / "o.jsonl")]) == 2
    assert "HTTP 401: no key (the server requires an API key; set FCTUNE_API_KEY)" in capsys.readouterr().err


def test_a_server_that_fails_in_the_middle_is_asked_for_the_rest_by_the_next_run(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    is_well = False

    def behave(handler: Handler, number: int, body: dict[str, Any]) -> None:
        if "Oslo" in body["messages"][-1]["content"] and not is_well:
            handler.send(200, '{"choices": [{"mess', length=400)
        else:
            oracle(handler, number, body, is_native=True)

    with serve(behave) as log:
        command = ["--model", log.url, "--suite", "smoke", "--out", str(out), "--attempts", "2"]
        assert tool_calls.main(command) == 1
        assert [row["verdict"] for row in read_rows(out)] == ["correct", "correct", "no_answer", "correct"]
        num_asked, is_well = len(log.bodies), True
        assert tool_calls.main(command) == 0
        assert len(log.bodies) == num_asked + 1
    assert all(row["verdict"] == "correct" for row in read_rows(out))


def test_failures_become_drafts_and_a_page(tmp_path: Path) -> None:
    with serve(lambda h, n, b: oracle(h, n, b, is_native=True, wrong="meeting")) as log:
        drafts, page = tmp_path / "new" / "drafts.jsonl", tmp_path / "new" / "page.html"
        command = ["--model", log.url, "--suite", "smoke", "--out", str(tmp_path / "o.jsonl")]
        assert tool_calls.main([*command, "--propose", str(drafts), "--html", str(page)]) == 0
    (draft,) = [json.loads(line) for line in drafts.read_text().splitlines()]
    assert (draft["case"], draft["error_class"], draft["reviewed"]) == ("meeting", "missed_call", False)
    assert "schedule_meeting" in page.read_text()


@needs_wheel
def test_no_drafts_are_made_from_a_benchmark_and_it_has_no_total(
    tmp_path: Path, tiny_base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--model", str(tiny_base), "--suite", "bfcl", "--categories", "simple_python", "--limit", "2"]
    command += ["--out", str(tmp_path / "o.jsonl"), "--max-new-tokens", "4"]
    assert tool_calls.main([*command, "--propose", str(tmp_path / "d.jsonl")]) == 2
    assert "bfcl belongs to a benchmark (BFCL v4)" in capsys.readouterr().err
    assert not (tmp_path / "o.jsonl").exists()
    assert tool_calls.main([*command, "--min-accuracy", "0.5"]) == 2
    assert "has no accuracy over all" in capsys.readouterr().err
    assert tool_calls.main(command) == 0
    summary = json.loads((tmp_path / "o.summary.json").read_text())
    assert summary["scores"].keys() == summary["typed"].keys() == {"simple_python"}


@needs_wheel
def test_categories_that_are_not_run_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serve(lambda handler, *_: handler.say("No.")) as log:
        command = ["--model", log.url, "--suite", "bfcl", "--categories", "live_relevance,memory_kv"]
        assert tool_calls.main([*command, "--out", str(tmp_path / "o.jsonl")]) == 0
    printed = capsys.readouterr().out
    assert "not run: memory_kv" in printed
    assert "0.0%" not in next(line for line in printed.splitlines() if "memory_kv" in line)


@pytest.mark.thorough
@needs_wheel
def test_multi_turn_cases_are_judged_and_never_drafted(
    tmp_path: Path, tiny_base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command, with the model itself, on two cases whose tools are few."""
    data = tmp_path / "data"
    (data / "possible_answer").mkdir(parents=True)
    (data / "multi_turn_func_doc").symlink_to(data_dir() / "multi_turn_func_doc")
    ids = ("multi_turn_base_50", "multi_turn_base_100")
    for name in ("BFCL_v4_multi_turn_base.json", "possible_answer/BFCL_v4_multi_turn_base.json"):
        rows = [line for line in (data_dir() / name).read_text().splitlines() if json.loads(line)["id"] in ids]
        (data / name).write_text("\n".join(rows))
    out = tmp_path / "o.jsonl"
    command = ["--model", str(tiny_base), "--suite", "bfcl", "--categories", "multi_turn_base"]
    command += [
        "--bfcl-data",
        str(data),
        "--out",
        str(out),
        "--max-new-tokens",
        "4",
        "--html",
        str(tmp_path / "o.html"),
    ]
    assert tool_calls.main([*command, "--propose", str(tmp_path / "d.jsonl")]) == 2
    assert "bfcl belongs to a benchmark (BFCL v4)" in capsys.readouterr().err
    assert not out.exists()
    assert tool_calls.main(command) == 0
    printed = capsys.readouterr().out
    assert "not run" not in printed
    rows = read_rows(out)
    assert [(row["id"], row["verdict"], len(row["turns"])) for row in rows] == [
        (ids[0], "missed_call", 1),
        (ids[1], "missed_call", 2),
    ]
    assert all(len(row["messages"]) == 2 * len(row["turns"]) for row in rows)
    summary = json.loads(out.with_suffix(".summary.json").read_text())
    assert summary["scores"]["multi_turn_base"]["n"] == summary["num_cases"] == summary["settings"]["num_cases"] == 2
    assert summary["typed"]["multi_turn_base"]["successes"] == 0
    assert "multi_turn_base_100" in (tmp_path / "o.html").read_text()
    assert compare.main([str(out), str(out)]) == 0
    before = out.read_bytes()
    assert tool_calls.main(command) == 0
    assert out.read_bytes() == before


@pytest.mark.slow
def test_all_ranks_of_torchrun_and_tune_run_give_the_answers_of_one_process(tmp_path: Path, tiny_base: Path) -> None:
    what = ["--model", str(tiny_base), "--suite", "synthetic", "--num-cases", "12", "--max-new-tokens", "24"]
    outs = {name: tmp_path / f"{name}.jsonl" for name in ("one", "torchrun", "tune")}
    assert tool_calls.main([*what, "--out", str(outs["one"])]) == 0
    config = tmp_path / "eval.yaml"
    config.write_text(f"model: {tiny_base}\nsuite: synthetic\nnum_cases: 12\nmax_new_tokens: 24\nout: {outs['tune']}\n")
    scripts = Path(sys.executable).parent
    torchrun = [scripts / "torchrun", "--standalone", "--nproc_per_node", "2", "-m", "eval.tool_calls", *what]
    tune = [scripts / "tune", "run", "--nproc_per_node", "2", "eval/tool_calls", "--config", config]
    for command in ([*torchrun, "--out", outs["torchrun"]], tune):
        done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("tool-call accuracy") == 1
    rows = {name: [{**row, "seconds": None} for row in read_rows(out)] for name, out in outs.items()}
    assert rows["one"] == rows["torchrun"] == rows["tune"]


def test_results_of_different_cases_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, identity in (("a", "1"), ("b", "2")):
        row = {"id": identity, "category": "x", "verdict": "correct"}
        (tmp_path / name).write_text(json.dumps(row))
    assert compare.main([str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    assert "same cases" in capsys.readouterr().err


def test_results_of_different_settings_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, limit in (("a", 8), ("b", 9)):
        row = {"id": "1", "category": "x", "verdict": "correct"}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row))
        (tmp_path / f"{name}.settings.json").write_text(json.dumps({"max_new_tokens": limit}))
    assert compare.main([str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]) == 2
    assert "max_new_tokens is 8 in one and 9 in the other" in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["--lenient"]], ids=["strict", "lenient"])
def test_verdicts_of_score_are_not_compared_as_results(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their ``verdict`` is not the benchmark's, so that accuracies would differ from those that score printed."""
    for name in ("cases", "predictions"):
        message = {"messages": [{"role": "user", "content": "Hi"}], "tools": [], "expected_calls": []}
        row = {"id": "1", **(message if name == "cases" else {"calls": []})}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    out = tmp_path / "verdicts.jsonl"
    score_file(load_suite(tmp_path / "cases.jsonl"), tmp_path / "predictions.jsonl", out)
    assert compare.main([str(out), str(out), *options]) == 2
    said = capsys.readouterr().err
    assert f"{out}: contains verdicts of fctune score" in said
    assert "Pass a file that fctune eval wrote." in said


def test_a_comparison_lists_the_cases_that_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, right in (("a", "12"), ("b", "134")):
        rows = [{"id": i, "category": "x", "verdict": "correct" if i in right else "wrong_name"} for i in "123456"]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = tmp_path / "deep" / "compared.json"
    assert compare.main([str(tmp_path / "a"), str(tmp_path / "b"), "--show", "1", "--json", str(found)]) == 0
    printed = capsys.readouterr().out
    assert "x, turned right: 3 and 1 more" in printed
    assert "x, turned wrong: 2" in printed
    compared = json.loads(found.read_text())["all"]
    assert (compared["turned_right"], compared["turned_wrong"]) == (["3", "4"], ["2"])
    assert compared["difference"] == pytest.approx(1 / 6)
    assert compared["low"] < compared["difference"] < compared["high"]
    assert compared["p_value"] == 1.0

    page = tmp_path / "deep" / "compared.html"
    assert compare.main([str(tmp_path / "a"), str(tmp_path / "b"), "--html", str(page)]) == 0
    assert "+16.7%" in page.read_text()
    assert compare.main([str(tmp_path / "a"), str(tmp_path / "b"), "--html", str(page), "--lenient"]) == 2
    assert "--html: shows the strict reading" in capsys.readouterr().err


@needs_wheel
def test_the_leaderboards_own_prompt_is_sent_without_tools_and_its_answers_are_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = BfclSuite(data_dir(), ["parallel"], mode="prompt").cases[:5]
    by_question = {case.prompt.messages[-1].content: case for case in asked}

    def answer(handler: Handler, number: int, body: dict[str, Any]) -> None:
        assert "tools" not in body
        assert "in json format that you can invoke" in body["messages"][0]["content"]
        case = by_question[body["messages"][-1]["content"]]
        handler.say(f"```\n{FORMATS['pythonic'].render(case.expected)}\n```" if case is not asked[0] else "No.")

    command = ["--suite", "bfcl", "--bfcl-mode", "prompt", "--categories", "parallel,simple_java", "--limit", "5"]
    with serve(answer) as log:
        command += ["--model", log.url, "--out", str(tmp_path / "o.jsonl")]
        assert tool_calls.main([*command, "--format", "hermes"]) == 2
        assert "--format hermes: the prompts of bfcl_prompt ask for a format" in capsys.readouterr().err
        assert tool_calls.main([*command, "--html", str(tmp_path / "page.html")]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "overall as the leaderboard weighs it: 2.00% of BFCL v4 (bfcl-eval 2026.3.23)" in printed
    assert "measured on fewer cases than the leaderboard's: parallel" in printed
    assert "not run: simple_java" in printed
    assert "Leaderboard" in (tmp_path / "page.html").read_text()
    summary = json.loads((tmp_path / "o.summary.json").read_text())
    assert summary["scores"]["parallel"]["rates"]["accuracy"]["successes"] == 4
    assert summary["settings"]["format"] == "bfcl_prompt"
    assert summary["release"] == summary["settings"]["release"] == "bfcl-eval 2026.3.23"
