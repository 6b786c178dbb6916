"""The model card of an export: what it was trained from and on, its measured accuracy, and how to serve it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from fctune.calls.server_parsers import read_server_parsers
from fctune.config.intervals import format_count
from fctune.data.fingerprint import DATASET_SNAPSHOT
from fctune.data.template_args import read_template_args
from fctune.engines.model_files import ModelFiles
from fctune.engines.vllm_options import UnservedAdapterError, adapter_options, template_options
from fctune.models.adapter_base import read_base
from fctune.models.hub import parse_name
from fctune.pages.run_text import describe_method, format_bounds, format_number, format_seconds
from fctune.runs.figures import FINAL_STEPS, describe_run
from fctune.runs.record import RunRecord
from fctune.runs.release import read_mark
from fctune.tasks.evaluation.accuracy import Accuracy

FILE_NAME = "README.md"
WRITTEN_BY = "<!-- Written by fctune push, which replaces it. Remove this line to keep your own changes. -->"


def make_model_card(
    export: Path, name: str, record: RunRecord | None = None, accuracies: Sequence[Accuracy] = ()
) -> str:
    """Return the card in Markdown, with the header that the Hugging Face hub reads.

    Only what was recorded or measured is written; a section without any is left out. An adapter's base is the one that
    its adapter_config.json names.

    Args:
        export: The model or adapter directory.
        name: OWNER/NAME of the repository.
        record: The run that made the export; None: unknown.
        accuracies: Evaluations of the export.

    Raises:
        ConfigError: The export's files are damaged, or an adapter names no base.
    """
    is_adapter = (export / "adapter_config.json").is_file()
    config = record.config if record else {}
    base_path = read_base(export) if is_adapter else str(config.get("model", {}).get("path", ""))
    base = name_on_hub(base_path)
    sources = config.get("data", {}).get("sources", ())
    header: dict[str, Any] = {
        "library_name": "peft" if is_adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["function-calling", "tool-use", "fctune"],
    }
    if base is not None:
        header |= {"base_model": base, "base_model_relation": "adapter" if is_adapter else "finetune"}
    datasets = [found for source in sources if (found := name_on_hub(source["path"])) is not None]
    if datasets:
        header["datasets"] = sorted(set(datasets))
    sections = [
        f"---\n{yaml.safe_dump(header, sort_keys=False)}---\n{WRITTEN_BY}",
        f"# {name.split('/')[-1]}",
        _describe(is_adapter, base, config),
        *_describe_mark(export),
        *_list_accuracies(accuracies),
        *(_describe_training(record) if record else ()),
        *_describe_serving(export, name, base_path if is_adapter else None),
        *_describe_parsing(record.run.get("response_template") if record else None),
    ]
    return "\n\n".join(sections) + "\n"


def name_on_hub(path: str) -> str | None:
    """Return OWNER/NAME of a path ``hf:OWNER/NAME[@REVISION][:SPLIT]``; None for a local path.

    A data set that was downloaded before the run, as on a cluster, has the name of its repository.
    """
    if not path.startswith("hf:"):
        return None
    if found := DATASET_SNAPSHOT.match(path):
        return found[1].replace("--", "/", 1)
    spec = path.removeprefix("hf:").partition("@")[0].split(":")[0]
    return None if spec.startswith(("/", ".")) or spec.count("/") > 1 else spec


def _describe(is_adapter: bool, base: str | None, config: dict[str, Any]) -> str:
    kind = "An adapter that makes" if is_adapter else "A model fine-tuned to make"
    origin = f" of [{base}](https://huggingface.co/{base})" if base else ""
    what = f"{kind} a chat model{origin} call tools" if is_adapter else f"{kind} tool calls"
    of = f", trained from [{base}](https://huggingface.co/{base})" if base and not is_adapter else ""
    method = f" Method: {describe_method(config.get('adapter'))}." if config else ""
    return f"{what}{of}, with fctune.{method}"


def _describe_mark(export: Path) -> list[str]:
    """Return the lines on which the gate stopped the model; nothing if it did not."""
    lines = read_mark(export)
    if lines is None:
        return []
    text = "The comparison with its base stopped this model, and it was published nevertheless."
    if not lines:
        return ["## Not released", f"{text} The record of what stopped it is damaged."]
    meanings = {
        "worse": "it lost more than is accepted",
        "undecided": "the sample is too small to rule out that it did",
    }
    verdicts = {line["verdict"] for line in lines}
    meant = "; ".join(f"*{name}*: {meaning}" for name, meaning in meanings.items() if name in verdicts)
    rows = [_row([line["title"], line["verdict"]]) for line in lines]
    table = "\n".join([_row(["line", "verdict"]), _row(["---", "---"]), *rows])
    return ["## Not released", f"{text} {meant[0].upper() + meant[1:] + '.' if meant else ''}".strip(), table]


def add_mark(export: Path, text: str) -> str:
    """Return a card that others wrote with the section of the lines on which the gate stopped the model, if it did."""
    section = "\n\n".join(_describe_mark(export))
    return text if section in text else f"{text.rstrip()}\n\n{section}\n"


def _list_accuracies(accuracies: Sequence[Accuracy]) -> list[str]:
    """Return one section with a table of each suite: accuracy with its 95 % interval, and the base model's."""
    if not accuracies:
        return []
    parts = [
        "## Accuracy",
        "Share of cases with exactly the right calls, with 95 % Wilson intervals; differences are tested in pairs "
        "(McNemar).",
    ]
    for accuracy in accuracies:
        compared = {one.category: one for one in accuracy.compare()}
        head = ["category", "cases", "accuracy", "interval", *(["base", "p"] if compared else [])]
        lines = [_row(head), _row(["---"] * len(head))]
        for category, found in accuracy.rates():
            cells = [category, f"{found['n']:,}", f"{found['rate']:.1%}", format_bounds(found)]
            if compared:
                one = compared[category]
                cells += [f"{one.num_right_before / one.n:.1%}", f"{one.p_value:.2g}"]
            lines.append(_row(cells))
        parts += [f"### {accuracy.suite}", "\n".join(lines)]
    return parts


def _describe_training(record: RunRecord) -> list[str]:
    figures, config, run = describe_run(record), record.config, record.run
    data, model = config.get("data", {}), config.get("model", {})
    sources = [
        _name(source["path"]) + (f" (weight {source['weight']:g})" if source.get("weight", 1.0) != 1.0 else "")
        for source in data.get("sources", ())
    ]
    size = run.get("world_size")
    facts = {
        "base model": _name(model["path"]) if model.get("path") else None,
        "chat template": _name(model["chat_template"]) if model.get("chat_template") else "the base model's",
        "data": ", ".join(sources),
        "benchmark questions": _describe_benchmark(run),
        "sequence length": data.get("seq_len"),
        "steps": f"{figures.num_steps:,} of {record.num_steps:,}" if record.num_steps else figures.num_steps or None,
        "sequences a step": config.get("global_batch_size"),
        "tokens": format_number(figures.tokens_total),
        f"training loss, last {FINAL_STEPS} steps": format_number(figures.final_loss),
        "validation loss": format_number(figures.validation_loss),
        "hardware": f"{size} x {run.get('device')}" if size and run.get("device") else run.get("device"),
        "time": format_seconds(figures.time.elapsed_s),
        "GPU-hours": format_number(figures.time.gpu_hours),
        "seed": config.get("seed"),
        "versions": ", ".join(f"{package} {version}" for package, version in run.get("versions", {}).items()),
    }
    lines = [_row(["", ""]), _row(["---", "---"])]
    lines += [_row([name, str(value)]) for name, value in facts.items() if value not in (None, "")]
    return ["## Training", "\n".join(lines)]


def _name(path: str) -> str:
    """Return the name on the hub, or the last part of a local path; the rest of it is not published."""
    return f"`{name_on_hub(path) or Path(path).name}`"


def _describe_benchmark(run: dict[str, Any]) -> str | None:
    num_rows = (run.get("data") or {}).get("benchmark_rows")
    return f"trained on {num_rows:,}; do not measure the model with this benchmark" if num_rows else None


def _describe_serving(export: Path, name: str, base: str | None) -> list[str]:
    """Return the section of commands, with the options that ``fctune serve`` passes.

    Args:
        export: The model or adapter directory.
        name: OWNER/NAME of the repository.
        base: Base of an adapter, as ``model.path`` takes it; None: the export is no adapter.
    """
    parsers = read_server_parsers(export) or {}
    model, adapter, notes = name, list[str](), [_SERVING]
    if base is not None:
        named = parse_name(base)
        try:
            adapter = adapter_options(ModelFiles(Path(base), export), name.split("/")[-1], address=name)
        except UnservedAdapterError as error:
            model = "export/merged"
            notes.append(f"Serve the merged model, because {error.reason}: {_MERGED}")
        else:
            if named is None:  # nobody else has the base
                return []
            model, revision = named
            if revision:
                adapter += ["--revision", revision]
                if "--tokenizer" in adapter:  # whose revision would be the base's by default
                    adapter += ["--tokenizer-revision", "main"]
    starts = {"vllm": ["vllm", "serve", model, *adapter, "--enable-auto-tool-choice"]}
    if not adapter:
        starts["sglang"] = ["python", "-m", "sglang.launch_server", "--model-path", model]
    commands = []
    for server, words in starts.items():
        found = parsers.get(server, {})
        if found.get("tool_call_parser") is None:
            continue
        for option in _PARSER_OPTIONS:
            words += [f"--{option.replace('_', '-')}", value] if (value := found.get(option)) else []
        commands.append(shlex.join([*words, *template_options(read_template_args(export))]))
    return ["## Serving", *notes, "```bash\n" + "\n".join(commands) + "\n```"] if commands else []


def _describe_parsing(found: dict[str, Any] | None) -> list[str]:
    """Return the section on the response template, by which transformers parses answers; none if unknown."""
    if not found:
        return []
    note = f"{found['note'][0].upper()}{found['note'][1:]}." if found.get("note") else ""
    if found.get("origin") is None:
        return ["## Parsing", f"`tokenizer.parse_response` does not read this model's answers. {note}".strip()]
    parts = ["`tokenizer.parse_response` and vLLM's parser `hf` read answers by the tokenizer's `response_template`."]
    if found.get("calls"):
        parts.append(f"It reads {found['read']:,} of {format_count(found['calls'], 'held-out call')} as written.")
    if wrong := found.get("wrong"):
        parts.append(f"Others are {'; '.join(wrong)}.")
    return ["## Parsing", " ".join(filter(None, [*parts, note]))]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


_PARSER_OPTIONS = ("tool_call_parser", "reasoning_parser")
_SERVING = (
    "Tools are passed as in OpenAI's API (`tools=[...]`); the chat template writes them into the prompt. The parsers "
    "below read the calls as the model was trained to write them."
)
_MERGED = (
    "the run's `export/merged`, or what PEFT's `merge_and_unload` saves, with this repository's tokenizer and template."
)
