"""What TRL, LLaMA-Factory and axolotl train of the rows that fctune trains, token by token.

    python -m benchmarks.peer_rows --model DIR --data FILE [--limit N] [--skip-trl] [--llamafactory PYTHON]
        [--axolotl PYTHON] [--result FILE]

Rows in OpenAI's format are prepared by each tool's own code, and by fctune with the model's own template. Arguments of
calls are JSON strings, as OpenAI's API returns them, or objects, as most templates expect them. TRL's ``SFTTrainer``
renders the rows with its training template for the model if it has one. ``load_dataset`` reads them from a JSON Lines
file, and ``from_list`` takes them from memory; both are functions of the datasets package, as it is without options.
Without ``assistant_only_loss``, which is TRL's default, the loss covers every token.

LLaMA-Factory and axolotl each have an environment of their own; PYTHON is its interpreter. ``peer_rows_elsewhere`` says
how they get the rows.

Each row counts once in ``kinds``, by the first difference in this order: the tool drops it; its text differs; its text
is equal, but the tool does not train a token that fctune trains, or trains one that fctune does not.

``holds`` counts the rows of which a statement is true; see ``check``. The answers of a row are the text from the mark
that opens the assistant's turn to the end of sequence token, and everything else is its prompt.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.real_arguments import run_benchmark
from benchmarks.training import describe_machine
from fctune.base.errors import ConfigError
from fctune.base.files import write_atomically
from fctune.calls.formats.hermes import Hermes
from fctune.calls.matching import is_exact_match
from fctune.data.chat_template import ChatTemplate
from fctune.data.conversation import Call, Conversation, Message
from fctune.data.sources import read_source

VARIANTS = {  # by tool: form of the arguments, and how the tool gets the rows
    "trl": (
        ("objects", "load_dataset, assistant_only_loss"),
        ("strings", "load_dataset, assistant_only_loss"),
        ("objects", "from_list, assistant_only_loss"),
        ("objects", "load_dataset, untouched"),
    ),
    "llamafactory": (("objects", "sharegpt"), ("objects", "openai"), ("strings", "openai")),
    "axolotl": (("objects", "chat_template"), ("strings", "chat_template"), ("strings", "parameters")),
}
_SHAREGPT_ROLES = {"user": "human", "assistant": "gpt", "tool": "observation"}
_SHOWN = 120  # characters of a difference

Prepared = tuple[list[int], list[bool]]  # token ids, and which of them are trained
Marked = tuple[str, list[bool]]  # text, and which of its characters are trained


def make_rows(path: str, template: ChatTemplate, limit: int) -> list[tuple[dict[str, Any], Prepared]]:
    """Return rows in OpenAI's format, and as fctune prepares them; rows of one sample only."""
    rows = []
    for conversation in read_source(path):
        if isinstance(conversation, Conversation) and len(samples := template.encode(conversation)) == 1:
            rows.append((conversation.to_openai(), (samples[0].tokens, [w > 0 for w in samples[0].weights])))
        if len(rows) == limit:
            break
    return rows


def to_form(row: dict[str, Any], form: str) -> dict[str, Any]:
    """Return the row with the arguments of its calls as JSON strings or as objects."""
    row = json.loads(json.dumps(row))
    for message in row["messages"]:
        for call in message.get("tool_calls") or ():
            arguments = call["function"]["arguments"]
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            call["function"]["arguments"] = json.dumps(arguments) if form == "strings" else arguments
    return row


def to_sharegpt(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row, whose arguments are objects, in LLaMA-Factory's form of sharegpt.

    The text beside calls has no place in it. A turn ``function_call`` holds JSON, of a call or, as in LLaMA-Factory's
    own code, of a list of calls. Several results stand in one turn with the tags of the template between them, as its
    reader of OpenAI's format joins them.
    """
    turns = list[dict[str, Any]]()
    for message in row["messages"]:
        name, value = _SHAREGPT_ROLES.get(message["role"]), message["content"]
        if calls := message.get("tool_calls"):
            calls = [call["function"] for call in calls]
            name, value = "function_call", json.dumps(calls if len(calls) > 1 else calls[0], ensure_ascii=False)
        if name == "observation" and turns and turns[-1]["from"] == name:
            turns[-1]["value"] += f"\n</tool_response>\n<tool_response>\n{value}"
        elif name:
            turns.append({"from": name, "value": value})
    system = "".join(message["content"] for message in row["messages"][:1] if message["role"] == "system")
    tools = json.dumps(row["tools"], ensure_ascii=False) if row.get("tools") else ""
    return {"conversations": turns, "system": system, "tools": tools}


def to_text_parameters(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with the parameters of its tools as JSON strings, as axolotl's documentation recommends.

    It does so for parameters of one name that have several types, and for the arguments of calls.
    """
    row = json.loads(json.dumps(row))
    for function in (tool["function"] for tool in row.get("tools") or ()):
        if "parameters" in function:
            function["parameters"] = json.dumps(function["parameters"])
    return row


_LAYOUTS = {"sharegpt": to_sharegpt, "parameters": to_text_parameters}


def prepare_with_trl(rows: Sequence[dict[str, Any]], model_dir: Path, how: str) -> list[Prepared | None] | str:
    """Return the rows as TRL prepares them, or the error with which it refuses them."""
    from datasets import Dataset, load_dataset
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    loader, loss = how.split(", ")
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    config = AutoConfig.from_pretrained(model_dir)
    for name, value in (("num_hidden_layers", 1), ("hidden_size", 16), ("intermediate_size", 16)):
        setattr(config, name, value)
    config.num_attention_heads = config.num_key_value_heads = 1
    config.layer_types = ["full_attention"]
    with tempfile.TemporaryDirectory() as folder:
        settings = SFTConfig(
            *(folder,),
            max_length=None,
            assistant_only_loss=loss == "assistant_only_loss",
            use_cpu=True,
            report_to=[],
            packing=False,
            bf16=False,
        )
        try:
            if loader == "from_list":
                dataset = Dataset.from_list(list(rows))
            else:
                file = write_rows(rows, folder)
                dataset = load_dataset("json", data_files=str(file), split="train", cache_dir=folder)
            model = AutoModelForCausalLM.from_config(config)
            trainer = SFTTrainer(model=model, args=settings, train_dataset=dataset, processing_class=tokenizer)
        except Exception as error:  # of any kind: it is what the user sees
            return f"{type(error).__name__}: {error}"
        prepared = trainer.train_dataset
        labels = [row.get("labels") or row["input_ids"] for row in prepared]
        return [
            (row["input_ids"], [label != -100 for label in found]) for row, found in zip(prepared, labels, strict=True)
        ]


def write_rows(rows: Sequence[dict[str, Any]], folder: str) -> Path:
    """Write the rows to a JSON Lines file, and return it."""
    file = Path(folder, "rows.jsonl")
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def find_version(tool: str, python: str) -> str:
    """Return the version of a tool in an environment.

    Raises:
        ConfigError: The environment does not have the tool.
    """
    code = f"from importlib.metadata import version; print(version('{tool}'))"
    try:
        found = subprocess.run([python, "-c", code], capture_output=True, text=True)
    except OSError as error:
        raise ConfigError(f"--{tool} {python}: {error.strerror}. Pass the Python of an environment with it.") from None
    if found.returncode:
        raise ConfigError(f"--{tool} {python}: has no {tool}. Pass the Python of an environment with it.")
    return found.stdout.strip()


def prepare_elsewhere(
    tool: str, python: str, rows: Sequence[dict[str, Any]], model_dir: Path, layout: str
) -> tuple[str, list[Prepared | None] | str]:
    """Return the version of a tool in another environment, and its rows, None for each it drops, or its error.

    Raises:
        ConfigError: The environment does not have the tool, or the process failed.
    """
    found_version = find_version(tool, python)
    rows = list(map(_LAYOUTS[layout], rows)) if layout in _LAYOUTS else rows
    with tempfile.TemporaryDirectory() as folder:
        write_rows(rows, folder)
        script = Path(__file__).with_name("peer_rows_elsewhere.py")
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        done = subprocess.run(
            [python, "-P", str(script), tool, str(model_dir.resolve()), folder, layout],
            capture_output=True,
            text=True,
            env=environment,
            cwd=folder,
        )
        if done.returncode:
            raise ConfigError(f"--{tool} {python}: {done.stderr.strip()[-1_000:]}")
        found = json.loads(Path(folder, "result.json").read_text(encoding="utf-8"))
    if "refused" in found:
        return found_version, found["refused"]
    return found_version, [row and (row[0], row[1]) for row in found["rows"]]


def mark(prepared: Prepared, decode: Callable[..., str]) -> Marked:
    """Return the text of token ids, and for each character whether its token is trained."""
    tokens, trained = prepared
    pieces, flags, start = list[str](), list[bool](), 0
    for end, is_trained in enumerate(trained, start=1):
        piece = decode(*tokens[start:end])
        if not piece.endswith("\ufffd"):  # which ends within a character
            pieces.append(piece)
            flags += [is_trained] * len(piece)
            start = end
    return "".join(pieces), flags


def compare(ours: Marked, theirs: Marked) -> tuple[str, str]:
    """Return the kind of the first difference and an example of it; "equal" for none."""
    (text, chars), (other_text, other_chars) = ours, theirs
    text, other_text = text.rstrip("\n"), other_text.rstrip("\n")
    if text != other_text:
        pairs = enumerate(zip(text, other_text, strict=False))
        start = next((i for i, (char, other) in pairs if char != other), min(len(text), len(other_text)))
        return "text differs", f"{text[start : start + _SHOWN]!r} became {other_text[start : start + _SHOWN]!r}"
    trained = list(zip(text, chars, other_chars, strict=False))
    missing = [i for i, (_, mine, other) in enumerate(trained) if mine and not other]
    added = [i for i, (char, mine, other) in enumerate(trained) if other and not mine and not char.isspace()]
    if missing:
        return "trains less", repr(text[missing[0] : missing[0] + _SHOWN])
    if added:
        return "trains more", repr(text[added[0] : added[0] + _SHOWN])
    return "equal", ""


def split(row: Marked, opened: str, closed: str) -> tuple[Marked, list[Marked]]:
    """Return the prompt of a row, which is all but its answers, and its answers with the mark that closes each."""
    text, flags = row
    prompt, prompt_flags, answers = "", list[bool](), list[Marked]()
    position = 0
    while (found := text.find(opened, position)) >= 0:
        start = found + len(opened)
        end = text.find(closed, start)
        end = len(text) if end < 0 else end + len(closed)
        prompt, prompt_flags = prompt + text[position:start], prompt_flags + flags[position:start]
        answers.append((text[start:end], flags[start:end]))
        position = end
    return (prompt + text[position:], prompt_flags + flags[position:]), answers


def check(row: dict[str, Any], ours: Marked, theirs: Marked, marks: tuple[str, str]) -> dict[str, bool]:
    """Return which statements are true of a row.

    ``calls_equal``: The trained text of each answer, read strictly as Hermes calls, has the row's calls, and none if
    the row has none. ``parallel_calls_kept``: An answer has several calls, and all answers as many as in the row, of
    any values. ``prompts_equal`` and ``answers_equal``: The text is that of the model's own template.
    ``ends_trained``: The last token of each answer, which ends it, is trained. ``prompts_untrained``: No character of
    the prompt is trained, spaces apart.
    """
    (prompt, flags), answers = split(theirs, *marks)
    (our_prompt, _), our_answers = split(ours, *marks)
    expected = [
        [Call(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
        for message in to_form(row, "objects")["messages"]
        if message["role"] == "assistant"
    ]
    trained = ["".join(char for char, is_trained in zip(*one, strict=True) if is_trained) for one in answers]
    read = [Hermes().parse(text.removesuffix(marks[1])) for text in trained]
    counts = [len(one.calls) + len(one.malformed) for one in read]
    return {
        "calls_equal": len(read) == len(expected)
        and all(
            not one.malformed and is_exact_match(calls, one.calls) for calls, one in zip(expected, read, strict=True)
        ),
        "parallel_calls_kept": max(map(len, expected), default=0) > 1 and counts == list(map(len, expected)),
        "prompts_equal": prompt.rstrip() == our_prompt.rstrip(),
        "answers_equal": [text for text, _ in answers] == [text for text, _ in our_answers],
        "ends_trained": bool(answers) and all(text.endswith(marks[1]) and flags[-1] for text, flags in answers),
        "prompts_untrained": not any(flag and not char.isspace() for char, flag in zip(prompt, flags, strict=True)),
    }


def describe(
    rows: Sequence[dict[str, Any]], ours: Sequence[Marked], theirs: Sequence[Marked | None], marks: tuple[str, str]
) -> dict[str, Any]:
    """Return how the rows that a tool prepared compare with fctune's; it dropped those that are None."""
    kinds, examples, holds = Counter[str](), dict[str, str](), Counter[str]()
    for row, mine, other in zip(rows, ours, theirs, strict=True):
        kind, example = compare(mine, other) if other else ("dropped", "")
        kinds[kind] += 1
        examples.setdefault(kind, example)
        holds.update(check(row, mine, other, marks) if other else {})
    return {"kinds": dict(kinds), "examples": examples, "holds": dict(holds)}


def count_rows(rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Count the rows by what a tool may lose of them."""
    calls = [[len(message.get("tool_calls") or ()) for message in row["messages"]] for row in rows]
    return {
        "rows_with_parallel_calls": sum(max(one) > 1 for one in calls),
        "rows_with_results": sum(any(message["role"] == "tool" for message in row["messages"]) for row in rows),
        "rows_without_calls": sum(not any(one) for one in calls),
        "rows_with_text_beside_calls": sum(
            any(message.get("tool_calls") and message["content"] for message in row["messages"]) for row in rows
        ),
    }


def find_marks(template: ChatTemplate) -> tuple[str, str]:
    """Return what opens an answer in the template, and the token that closes it."""
    asked = Conversation((Message("user", "Hi"),))
    opened = template.render(asked, add_generation_prompt=True).removeprefix(template.render(asked))
    return opened, template.tokenizer.eos_token


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, print the results, and write them if a file is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, metavar="DIR")
    parser.add_argument("--data", required=True, metavar="FILE", help="rows in any format that fctune reads")
    parser.add_argument("--limit", type=int, default=400, metavar="N", help="rows; default: %(default)s")
    parser.add_argument("--skip-trl", action="store_true", help="compare with the other tools only")
    parser.add_argument("--llamafactory", metavar="PYTHON", help="of an environment with LLaMA-Factory")
    parser.add_argument("--axolotl", metavar="PYTHON", help="of an environment with axolotl")
    parser.add_argument("--result", type=Path, metavar="FILE", help="JSON file to write")
    arguments = parser.parse_args(argv)
    return run_benchmark(lambda: run(arguments))


def run(arguments: argparse.Namespace) -> str:
    """Return the results of all variants as JSON."""
    template = ChatTemplate(arguments.model)
    marks = find_marks(template)
    decode = cache(lambda *tokens: template.tokenizer.decode(tokens))  # most tokens occur often
    rows, prepared_by_us = zip(*make_rows(arguments.data, template, arguments.limit), strict=True)
    ours = [mark(one, decode) for one in prepared_by_us]
    versions = {name: version(name) for name in ("trl", "datasets")}
    found: dict[str, Any] = {}
    for tool, variants in VARIANTS.items():
        python = None if tool == "trl" else getattr(arguments, tool)
        is_asked = python is not None or (tool == "trl" and not arguments.skip_trl)
        for form, how in variants if is_asked else ():
            given = [to_form(row, form) for row in rows]
            prepared: list[Prepared | None] | str
            if python is None:
                prepared = prepare_with_trl(given, arguments.model, how)
            else:
                versions[tool], prepared = prepare_elsewhere(tool, python, given, arguments.model, how)
            if isinstance(prepared, str):
                found[f"{tool}: {form}, {how}"] = {"refused": prepared}
                continue
            compared = describe(rows, ours, [one and mark(one, decode) for one in prepared], marks)
            tokens = {"fctune": sum(sum(one[1]) for one in prepared_by_us)}
            tokens[tool] = sum(sum(one[1]) for one in prepared if one)
            found[f"{tool}: {form}, {how}"] = compared | {"tokens_trained": tokens}
    if arguments.result is not None:
        described = {
            "date": f"{datetime.date.today()}",
            "model": arguments.model.name,
            "versions": versions,
            "rows": len(rows),
            **count_rows(rows),
            "machine": describe_machine(),
            "fctune": {"holds": describe(rows, ours, ours, marks)["holds"]},
            "variants": found,
        }
        write_atomically(arguments.result, json.dumps(described, indent=1) + "\n")
    return json.dumps(found, indent=1)


if __name__ == "__main__":
    sys.exit(main())
