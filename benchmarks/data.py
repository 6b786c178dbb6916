"""Preparation of the same rows by this project, TRL's SFT trainer, and torchtune's dataset with PackedDataset.

    python benchmarks/data.py [--rows 20000] [--repeats 3] [--out benchmarks/results/data.json]
    python benchmarks/data.py --memory 1000000
    python benchmarks/data.py --bounds [--rows 20000] [--repeats 5] [--out benchmarks/results/template_bounds.json]
    python benchmarks/data.py --secrets [--rows 20000] [--repeats 3] [--out benchmarks/results/secrets.json]

Each measurement is a process of its own, the three take turns, and the median of the repeats is reported. Every one
reads a file of JSON lines, tokenises, masks and packs to 4,096 tokens, with two processes where it can use them
(torchtune packs in one); imports and a first loading of the tokenizer are outside of the time. Rows are the synthetic
set; torchtune 0.6.1 cannot read tool calls, so it gets the same text as plain messages. A second start is the same
command again, with whatever the first left on disk.

``--bounds`` measures what the limits on foreign chat templates cost an honest one: the same rows with a copy of the
tiny model's template that is not recognised as ours, and with one that is, in turns.

``--secrets`` measures what the search for secrets costs: the same rows encoded in one process with ``data.secrets:
warn`` and with ``ignore``, in turns, in seconds of computing.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
TINY_BASE = ROOT / "fctune" / "assets" / "tiny_base"
SEQ_LEN = 4096
PROCESSES = 2
SETTLED_S = 5  # rows are older than a file system's clock is coarse, as they are where somebody trains on them


def run_ours(folder: Path) -> dict[str, float]:
    """Prepare the rows with fctune.data.prepared_set."""
    from transformers import AutoTokenizer

    from fctune.config.sections.data import DataConfig, SourceConfig
    from fctune.data.prepared_set import prepare

    AutoTokenizer.from_pretrained(TINY_BASE)
    config = DataConfig(sources=[SourceConfig(path=str(folder / "rows.jsonl"))], validation_share=0.0, seq_len=SEQ_LEN)
    start = time.perf_counter()
    prepared = prepare(config, TINY_BASE, folder / "ours")
    seconds = time.perf_counter() - start
    real = prepared.counts.tokens / (prepared.num_packs("train") * SEQ_LEN)
    return {"seconds": seconds, "tokens": prepared.counts.tokens, "real_share": real}


def run_bounded(folder: Path) -> dict[str, float]:
    """Prepare the rows with a chat template that does not come with fctune, in processes with limits."""
    return _run_with_template(folder, is_own=False)


def run_unbounded(folder: Path) -> dict[str, float]:
    """Prepare the rows with the same template, taken for one that comes with fctune."""
    return _run_with_template(folder, is_own=True)


def _run_with_template(folder: Path, is_own: bool) -> dict[str, float]:
    """Return the seconds of the preparation; they include the start of the processes with limits."""
    from fctune.config.sections.data import DataConfig, SourceConfig
    from fctune.data import chat_template, tracing
    from fctune.data.prepared_set import prepare

    model = folder / "foreign"
    if not model.exists():
        shutil.copytree(TINY_BASE, model)
        settings = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
        settings["chat_template"] += "{# foreign #}"
        (model / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    own = tracing.read_own_templates()
    if is_own:
        own |= {json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))["chat_template"]}
    config = DataConfig(sources=[SourceConfig(path=str(folder / "rows.jsonl"))], validation_share=0.0, seq_len=SEQ_LEN)
    out = Path(tempfile.mkdtemp(dir=folder))
    start = time.perf_counter()
    with (
        patch.object(tracing, "read_own_templates", lambda: own),
        patch.object(chat_template, "read_own_templates", lambda: own),
    ):
        prepared = prepare(config, model, out)
    seconds = time.perf_counter() - start
    shutil.rmtree(out)
    return {"seconds": seconds, "tokens": prepared.counts.tokens}


def run_screened(folder: Path) -> dict[str, float]:
    """Encode the rows, and look for secrets in them."""
    return _encode(folder, "warn")


def run_unscreened(folder: Path) -> dict[str, float]:
    """Encode the rows alone."""
    return _encode(folder, "ignore")


def _encode(folder: Path, secrets: Literal["warn", "ignore"]) -> dict[str, float]:
    """Return the seconds that one process computes for encoding the rows; they include loading the patterns."""
    from fctune.config.sections.data import DataConfig, SourceConfig
    from fctune.data.chunk_encoder import Counts
    from fctune.data.encoding import encode_sources

    config = DataConfig(sources=[SourceConfig(path=str(folder / "rows.jsonl"))], seq_len=SEQ_LEN, secrets=secrets)
    counts = Counts()
    start = time.process_time()
    for _ in encode_sources(config, TINY_BASE, counts, num_processes=1):
        pass
    return {"seconds": time.process_time() - start, "tokens": counts.tokens}


def measure_pairs(tools: tuple[str, str], num_rows: int, repeats: int) -> dict[str, Any]:
    """Measure the same work with something and without it in turns, and return all runs and the medians."""
    runs: dict[str, list[dict[str, float]]] = {tool: [] for tool in tools}
    with tempfile.TemporaryDirectory() as name:
        write_inputs(Path(name), num_rows)
        time.sleep(SETTLED_S)
        for repeat in range(repeats):
            for tool in tools if repeat % 2 else tools[::-1]:
                runs[tool].append(measure(tool, Path(name)))
    assert len({run["tokens"] for each in runs.values() for run in each}) == 1, "both encode the same"
    middle = {tool: round(statistics.median(run["seconds"] for run in each), 2) for tool, each in runs.items()}
    # Each pair ran one after the other: what slows the machine for a while slows both.
    pairs = zip(runs[tools[0]], runs[tools[1]], strict=True)
    added = sorted(round(more["seconds"] / less["seconds"] - 1, 3) for more, less in pairs)
    return {
        "rows": num_rows,
        f"added_by_{'bounds' if tools[0] == 'bounded' else 'secrets'}": statistics.median(added),
        "added_in_pairs": added,
        "median_seconds": middle,
        "runs": runs,
    }


_MARKED_TEMPLATE = """{{- bos_token }}
{%- if tools %}
    {{- '<|start_header_id|>system<|end_header_id|>\\n\\nTools:\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool.function | tojson) }}{%- endfor %}
    {{- '\\n</tools><|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|eot_id|>' }}{%- endgeneration %}
    {%- else %}
        {{- message.content + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}"""


def run_trl(folder: Path) -> dict[str, float]:
    """Construct TRL's SFTTrainer, which prepares the rows."""
    os.environ["HF_DATASETS_CACHE"] = str(folder / "hf")
    from datasets import load_dataset
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    tokenizer = AutoTokenizer.from_pretrained(TINY_BASE)
    # TRL masks by {% generation %} markers, which must be added to a template manually.
    tokenizer.chat_template = _MARKED_TEMPLATE
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes))
    config = SFTConfig(
        output_dir=str(folder / "trl"),
        max_length=SEQ_LEN,
        packing=True,
        assistant_only_loss=True,
        dataset_num_proc=PROCESSES,
        report_to=[],
        use_cpu=True,
        bf16=False,
    )
    start = time.perf_counter()
    rows = load_dataset("json", data_files=str(folder / "text_arguments.jsonl"), split="train")
    trainer = SFTTrainer(model=model, args=config, train_dataset=rows, processing_class=tokenizer)
    seconds = time.perf_counter() - start
    packs = trainer.train_dataset
    tokens = sum(len(ids) for ids in packs["input_ids"])
    return {"seconds": seconds, "tokens": tokens, "real_share": tokens / (len(packs) * SEQ_LEN)}


def run_torchtune(folder: Path) -> dict[str, float]:
    """Load and pack the rows with torchtune's chat dataset and PackedDataset."""
    from torchtune.datasets import chat_dataset
    from torchtune.models.llama3 import llama3_tokenizer

    tokenizer = llama3_tokenizer(str(folder / "tokenizer.model"), str(folder / "special.json"), max_seq_len=SEQ_LEN)
    start = time.perf_counter()
    packed = chat_dataset(
        tokenizer,
        source="json",
        data_files=str(folder / "plain.jsonl"),
        split="train",
        conversation_column="messages",
        conversation_style="openai",
        packed=True,
    )
    seconds = time.perf_counter() - start
    tokens = sum(int(sum(pack["seq_lens"])) for pack in packed.packs)
    return {"seconds": seconds, "tokens": tokens, "real_share": tokens / (len(packed.packs) * SEQ_LEN)}


RUNS = {"fctune": run_ours, "trl": run_trl, "torchtune": run_torchtune}
BOUNDS = {"unbounded": run_unbounded, "bounded": run_bounded}
SECRETS = {"screened": run_screened, "unscreened": run_unscreened}


def run_rank(folder: Path) -> dict[str, float]:
    """Measure the growth in MiB of a rank's resident memory while it reads an epoch of a prepared set."""
    from fctune.data.loader import GlobalLoader
    from fctune.data.prepared_set import open_prepared

    before = _resident_mib()
    start = time.perf_counter()
    prepared = open_prepared(next(path for path in folder.iterdir() if path.is_dir()))
    loader = GlobalLoader(prepared, "train", 128, 1)
    loader.micro_batches(loader.step_at(1), 0, 2, 2)
    seconds, most = time.perf_counter() - start, _resident_mib()
    for step in range(2, loader.steps_per_epoch + 1):
        loader.micro_batches(loader.step_at(step), 0, 2, 2)
        most = max(most, _resident_mib()) if step % 50 == 0 else most
    return {"conversations": prepared.counts.conversations, "growth_mib": most - before, "first_step_seconds": seconds}


def _resident_mib() -> float:
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))) / 1024


def measure_memory(num_rows: int) -> dict[str, Any]:
    """Write a large set, then read it in another process as a rank does."""
    from fctune.config.sections.data import DataConfig, SourceConfig
    from fctune.data.prepared_set import prepare

    config = DataConfig(
        sources=[SourceConfig(path=f"synthetic:train:{num_rows}:1")], validation_share=0.0, seq_len=SEQ_LEN
    )
    with tempfile.TemporaryDirectory() as name:
        start = time.perf_counter()
        prepare(config, TINY_BASE, Path(name))
        seconds = time.perf_counter() - start
        writer = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return measure("rank", Path(name)) | {"write_seconds": seconds, "writer_peak_mib": writer}


def write_inputs(folder: Path, num_rows: int) -> None:
    """Write the rows in each tool's format, and the vocabulary as a tiktoken file for torchtune."""
    from fctune.data.synthetic import iter_conversations

    names = ("rows", "text_arguments", "plain")
    files = {name: open(folder / f"{name}.jsonl", "w", encoding="utf-8") for name in names}  # noqa: SIM115
    for conversation in iter_conversations("train", num_rows, 1):
        row = conversation.to_openai()
        files["rows"].write(json.dumps(row) + "\n")
        # Arrow fills structs with nulls, so TRL's users give tools as text.
        row["tools"] = json.dumps(row.get("tools"))
        for message in row["messages"]:
            message["content"] = message["content"] or ""
        files["text_arguments"].write(json.dumps(row) + "\n")
        system = [{"role": "system", "content": row["tools"]}]
        plain = [m for m in row["messages"] if m["role"] in ("user", "assistant")]
        text = [{"role": m["role"], "content": m["content"] or json.dumps(m.get("tool_calls"))} for m in plain]
        turns = [one for i, one in enumerate(text) if i == 0 or one["role"] != text[i - 1]["role"]]
        files["plain"].write(json.dumps({"messages": system + turns}) + "\n")
    for file in files.values():
        file.close()
    _write_tiktoken(folder)


def _write_tiktoken(folder: Path) -> None:
    vocab = json.loads((TINY_BASE / "tokenizer.json").read_text())["model"]["vocab"]
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(b): b for b in printable}
    table |= {chr(256 + i): b for i, b in enumerate(b for b in range(256) if b not in printable)}
    lines = [
        f"{base64.b64encode(bytes(table[c] for c in token)).decode()} {rank}"
        for rank, token in enumerate(sorted(vocab, key=vocab.__getitem__))
    ]
    (folder / "tokenizer.model").write_text("\n".join(lines) + "\n")
    names = "begin_of_text end_of_text reserved_special_token_0 reserved_special_token_1 finetune_right_pad_id step_id"
    names += " start_header_id end_header_id eom_id eot_id python_tag image"
    added = [{"id": len(vocab) + i, "content": f"<|{name}|>"} for i, name in enumerate(names.split())]
    (folder / "special.json").write_text(json.dumps({"added_tokens": added}))


def measure(tool: str, folder: Path) -> dict[str, float]:
    """Run one measurement in a process; peak memory is that of the process and of its children, in MiB."""
    command = [sys.executable, __file__, "--one", tool, "--folder", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{tool} failed:\n{done.stderr[-3000:]}")
    result: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--memory", type=int, metavar="N", help="instead: memory of a rank with N conversations")
    parser.add_argument("--bounds", action="store_true", help="instead: the cost of the limits on chat templates")
    parser.add_argument("--secrets", action="store_true", help="instead: the cost of the search for secrets")
    parser.add_argument("--one", choices=[*RUNS, *BOUNDS, *SECRETS, "rank"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        result = ({"rank": run_rank} | RUNS | BOUNDS | SECRETS)[arguments.one](arguments.folder)
        usage = [resource.getrusage(who).ru_maxrss / 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        print(json.dumps(result | {"peak_mib": usage[0], "peak_child_mib": usage[1]}))
        return
    if arguments.memory:
        print(json.dumps(measure_memory(arguments.memory)))
        return
    machine = f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores"
    if arguments.bounds or arguments.secrets:
        tools = ("bounded", "unbounded") if arguments.bounds else ("screened", "unscreened")
        report: dict[str, Any] = measure_pairs(tools, arguments.rows, arguments.repeats) | {"machine": machine}
        print(json.dumps({key: value for key, value in report.items() if key not in ("runs", "machine")}))
        if arguments.out:
            arguments.out.write_text(json.dumps(report, indent=2) + "\n")
        return
    results: dict[str, list[dict[str, Any]]] = {tool: [] for tool in RUNS}
    for _ in range(arguments.repeats):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_inputs(folder, arguments.rows)
            time.sleep(SETTLED_S)
            for tool in RUNS:
                first = measure(tool, folder)
                second = measure(tool, folder)
                results[tool].append(first | {"second_start_seconds": second["seconds"]})
            shutil.rmtree(folder / "hf", ignore_errors=True)
    report = {
        "rows": arguments.rows,
        "tools": {tool: summarise(runs, arguments.rows) for tool, runs in results.items()},
    }
    report |= {"runs": results, "machine": machine}
    report["versions"] = {name: version(name) for name in ("trl", "torchtune", "transformers", "datasets", "torch")}
    for tool, summary in report["tools"].items():
        print(tool, json.dumps(summary))
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=2) + "\n")


def summarise(runs: list[dict[str, Any]], num_rows: int) -> dict[str, float]:
    """Return the medians of the repeats."""
    middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    return {
        "rows_per_s": round(num_rows / middle["seconds"]),
        "tokens_per_s": round(middle["tokens"] / middle["seconds"]),
        "seconds": round(middle["seconds"], 2),
        "second_start_seconds": round(middle["second_start_seconds"], 3),
        "real_share": round(middle["real_share"], 4),
        "peak_mib": round(middle["peak_mib"]),
        "peak_child_mib": round(middle["peak_child_mib"]),
    }


if __name__ == "__main__":
    main()
