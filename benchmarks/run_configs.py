"""Run every shipped config from its first step to its export, on a model of its real depth with small random weights.

    python -m benchmarks.run_configs [NAME or FILE ...] [--results FILE] [--cold]

Each training config runs through ``fctune train``: with its model's own layers and chat template
(``benchmarks/deep_models.py``), rows in the shape of the data sets that it names, and compiled if it says so. The run
is stopped after its first step and resumed; it validates, evaluates, saves and exports, and transformers loads the
export. Only sizes change (see ``override``), and bfloat16 to float32 where it is emulated and too slow. A config that
ships uncompiled runs once more compiled, if no other config compiles that family. The acceptance configs run through
their own recipe.

The processes of a run are forks of one that has imported the libraries (``benchmarks/warm_python.py``); ``--cold``
starts new ones. Prints a table, also on failure, and writes ``benchmarks/results/configs.json``; each row names the
version of this runner that made it. Exits with 1 if a config fails. ``make configs`` runs it.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.deep_models import FAMILIES, describe_layers, place_model
from benchmarks.model_zoo import shrink
from benchmarks.training import describe_machine
from benchmarks.warm_python import WarmPython
from fctune.apps.acceptance.config import AcceptanceConfig
from fctune.base.exit_codes import STOPPED
from fctune.base.launcher_watch import stop_with_parent
from fctune.config.loading import compose_config, load_config
from fctune.config.schema import RunConfig
from fctune.config.sections.rollouts import is_dialogue_source
from fctune.config.shipped import list_shipped_configs
from fctune.data.prepared_set import PreparedSet, open_prepared
from fctune.data.synthetic import iter_conversations
from fctune.models.hub import parse_name
from fctune.models.precision import is_emulated
from fctune.models.sources import find_public_config
from fctune.tasks.environments.calendar import Calendar
from fctune.tasks.environments.files import Files
from fctune.tasks.environments.shop import Shop

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "configs.json"
ROWS = ROOT / "tests" / "configs" / "rows"  # written for this; in the shape of the data sets of the same names
SHIPPED_TEMPLATE = "hermes"  # for a model whose own chat template no installed package has

SEQ_LEN = 704
PAIR_LEN = 1024
DIALOGUE_LEN = 2048
SYNTHETIC_ROWS = 200
STEPS = 4  # one until the stop, and three of one process, of which the last two add no graph
COMPILED_STEPS = 3  # of the second run of a config that ships uncompiled
LIMIT_S = 900  # for each config, next to others
MIN_USED = 0.95  # share of the rows, of which two are defective; those longer than SEQ_LEN count as used
MIN_SHORT = 0.75  # share of the rows that are not longer

# Sources by the data set that a config names; anything else that is not synthetic fails.
DATASETS = {
    "NousResearch/hermes-function-calling-v1:func_calling_singleturn": "hermes_func_calling_singleturn.jsonl",
    "NousResearch/hermes-function-calling-v1:func_calling": "hermes_func_calling.jsonl",
    "glaiveai/glaive-function-calling-v2": "glaive_function_calling_v2.jsonl",
}
# Processes of a config whose layout needs several.
PROCESSES = {"tiny_lora": 2, "tiny_full": 2, "tiny_dpo": 2, "tiny_grpo": 2, "qwen2_5_72b_full": 4}
# One config of each kind of block compiles with Inductor, which takes a minute; the others stop before the kernels.
INDUCTOR = {
    "llama3_1_8b_lora": "dense, torchtune",
    "qwen3_0_6b_lora": "dense, transformers",
    "qwen3_30b_a3b_lora": "mixture of experts",
    "qwen3_5_4b_lora": "hybrid",
    "gemma3_270m_full": "Gemma",
}


# Configs that take half of the time together.
LONGEST = (
    *("qwen2_5_72b_full", "qwen3_5_4b_lora", "gemma4_e4b_lora", "llama3_1_8b_grpo", "qwen3_30b_a3b_lora"),
    "llama3_2_1b_qlora",
)
# What all runs import.
WARM_MODULES = (
    *("fctune.cli", "fctune.training.launcher", "torch.distributed.launcher.api", "fctune.training.entry"),
    *(
        "fctune.training.adapters",
        "fctune.training.preference",
        "fctune.training.reinforcement",
        "fctune.models.export",
    ),
    *("fctune.models.transformers.modules", "fctune.models.transformers.build", "fctune.models.torchtune.build"),
    *("torchtune.recipe_interfaces", "torch._dynamo", "torch._functorch.aot_autograd", "torch._inductor.compile_fx"),
)

# What an acceptance run for GPUs checks on a CPU, in small sizes.
ON_CPU = [
    *("arrival", "identity", "clocks", "compute", "corruption", "memory", "links", "collectives_all"),
    *("collective_data", "storage_shared", "storage_node", "storage_network", "training_node", "training_all"),
    "checkpoint",
]
SMALL_ACCEPTANCE = {
    "compute.dtypes": ["fp32"],
    "compute.size": 128,
    "compute.sustain_s": 1,
    "compute.copy_mib": 16,
    "compute.checksum_size": 128,
    "pairs.mib": 0.25,
    "collectives.sizes_mib": [0.25, 4],
    "collectives.judged_mib": 4,
    "storage.mib": 4,
    "storage.num_small_files": 20,
    "storage.num_flushes": 10,
    "training.steps": 3,
    "training.warmup": 1,
    "training.overrides": ["data.seq_len=64", "micro_batch_size=2", "compile=false", "adapter.dropout=0"],
}


@dataclass(kw_only=True, slots=True)
class Row:
    """Record of one config's run; ``failure`` is empty if all of it succeeded."""

    config: str
    digest: str
    model: str = ""
    layers: str = ""
    template: str = ""
    compiled: str = "no"
    precision: str = "as configured"
    graphs: list[int] = field(default_factory=list)  # after each step of a process that compiles
    rows_read: int = 0
    rows_used: int = 0
    conversations_per_pack: float = 0.0
    resumed_after: int = 0
    steps: int = 0
    done: list[str] = field(default_factory=list)
    seconds: float = 0.0
    cpu_s: float = 0.0  # of the processes of the run and of its checks
    failure: str = ""
    date: str = ""
    machine: dict[str, Any] = field(default_factory=dict)
    runner: str = ""  # digest of the files that decide what is run of a config
    versions: dict[str, str] = field(default_factory=dict)


_models = threading.Lock()  # transformers sets defaults of the process while it builds a model


class ConfigFailure(Exception):
    """A config that does not run as it should; the message says where."""


def iter_texts() -> Iterator[str]:
    """Yield all rows, some synthetic ones and the tools of environments, on which tokenizers are trained."""
    for path in sorted(ROWS.glob("*.jsonl")):
        yield from path.read_text(encoding="utf-8").splitlines()
    yield from (json.dumps(conversation.to_openai()) for conversation in iter_conversations("train", 100, 1))
    for environment in (Calendar, Files, Shop):
        yield from map(json.dumps, environment().list_tools())


def digest_config(path: Path) -> str:
    """Return a digest of the values that a config and those it extends give; comments and defaults do not count."""
    schema = RunConfig if not path.stem.startswith("acceptance") else AcceptanceConfig
    values = compose_config(path, schema).values
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=8).hexdigest()


def override(name: str, config: RunConfig, output_dir: Path) -> list[str]:
    """Return the overrides of a run: the rows' files, and smaller sizes and intervals."""
    values: dict[str, Any] = {
        "output_dir": output_dir,
        "data.seq_len": min(config.data.seq_len, find_length(config)),
        "micro_batch_size": 1,
        "max_steps": STEPS,
        "checkpoint.every": 3,
        "telemetry.prometheus.port": "null",  # two runs at a time
    }
    if config.validation.every and config.grpo is None:
        values["validation.every"] = 2
    for index, source in enumerate(config.data.sources):
        values[f"data.sources.{index}.path"] = find_rows(source.path)
    if config.grpo is None:
        values["global_batch_size"] = PROCESSES.get(name, 1)
    else:
        values |= {"grpo.prompts_per_step": 2, "grpo.group_size": 2, "grpo.max_new_tokens": 8}
        values["grpo.cases"] = re.sub(r":(\d+)", ":64", config.grpo.cases, count=1)
        # Random weights end no answer and are never right, so chance rewards them.
        values |= {"grpo.mask_cut": "false", "grpo.reward": "{random: 1}"}
        if is_dialogue_source(config.grpo.cases):
            values["grpo.dialogue.max_turns"] = 2
        if config.grpo.engine == "server":
            values |= {"grpo.engine": "in_process", "grpo.server": "null", "grpo.max_staleness": 0}
    if config.eval.every:
        values |= {"eval.max_cases": 2, "eval.max_new_tokens": 4, "eval.every": STEPS}
    if config.adapter is not None:
        values |= {"adapter.rank": 4, "adapter.alpha": 8}
    if lacks_template(config):
        values["model.chat_template"] = SHIPPED_TEMPLATE
    if config.precision == "bf16" and is_emulated(torch.bfloat16):
        values["precision"] = "fp32"  # configs with bf16_mixed compute in bfloat16 even there
    return [f"{key}={value}" for key, value in values.items()]


def find_length(config: RunConfig) -> int:
    """Return the tokens of a row of the run's batches."""
    if config.grpo is not None:
        return DIALOGUE_LEN
    # These chat templates explain calls in many words; one conversation would fill a shorter row.
    is_wordy = any(name in config.model.path for name in ("Qwen3.5", "Qwen2.5-Coder"))
    return PAIR_LEN if config.preference is not None or is_wordy else SEQ_LEN


def is_supervised(config: RunConfig) -> bool:
    """Return True if a config trains on conversations, rather than pairs of answers or its own."""
    return config.preference is None and config.grpo is None


def lacks_template(config: RunConfig) -> bool:
    """Return True if a config uses its model's own chat template, which no installed package has."""
    family = FAMILIES.get(model_name(config))
    return family is not None and family.template is None and config.model.chat_template is None


def model_name(config: RunConfig) -> str:
    """Return the hub name of a config's model, or its path."""
    return (parse_name(config.model.path) or (config.model.path, None))[0]


def find_rows(path: str) -> str:
    """Return the file with rows of a source's shape, or the synthetic source with fewer rows.

    Raises:
        ConfigFailure: There are no such rows.
    """
    if path.startswith("synthetic:"):
        return re.sub(r":(\d+)", lambda rows: f":{min(int(rows[1]), SYNTHETIC_ROWS)}", path, count=1)
    dataset = path.removeprefix("hf:").partition("@")[0]
    if dataset not in DATASETS:
        raise ConfigFailure(f"no rows in the shape of {dataset}: write some to {ROWS.relative_to(ROOT)}, for DATASETS")
    return str(ROWS / DATASETS[dataset])


class Runner:
    """Starts commands in an environment with its own caches.

    Args:
        folder: Working directory.
        limit_s: Seconds that a config may take.
        is_cold: Start a new interpreter for each process.
    """

    def __init__(self, folder: Path, limit_s: float = LIMIT_S, is_cold: bool = False):
        self.folder, self.limit_s, self._is_cold = folder, limit_s, is_cold
        self._warm = WarmPython(folder, WARM_MODULES, self.environment(None))
        self._ends: dict[str, float] = {}

    def environment(self, backend: str | None) -> dict[str, str]:
        """Return the variables of a run."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB", "HF_", "FCTUNE"))}
        own = {
            "HF_HUB_CACHE": str(self.folder / "hub"),
            "HF_HUB_OFFLINE": "1",
            "FCTUNE_CACHE": str(self.folder / "cache"),
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "COLUMNS": "200",
        }
        return kept | own | ({"TORCH_COMPILE_BACKEND": backend} if backend else {})

    def begin(self, row: Row) -> None:
        """Start the time limit of a config."""
        self._ends[row.config] = time.monotonic() + self.limit_s

    def seconds_left(self, row: Row) -> float:
        """Return the rest of a config's time limit."""
        return self._ends[row.config] - time.monotonic()

    def train(self, row: Row, path: Path, overrides: Sequence[str], backend: str | None, stops: bool = False) -> int:
        """Run ``fctune train``, and return its exit code; ``stops`` asks for a stop before the first step ends."""
        arguments = ["train", str(path), "--nproc", str(PROCESSES.get(row.config, 1)), *overrides]
        run = Path(next(o for o in overrides if o.startswith("output_dir=")).partition("=")[2])
        is_stopping = stops

        def stop() -> None:
            """Request a stop once the data is prepared; weights are loaded next."""
            nonlocal is_stopping
            if is_stopping and (run / "run.json").is_file() and '"num_steps"' in (run / "run.json").read_text():
                (run / "stop").touch()
                is_stopping = False

        log, environment = self.log(row), self.environment(backend)
        if self._is_cold:
            return self.wait(
                row, [self.start([sys.executable, "-m", "fctune.cli", *arguments], environment, log)], stop
            )[0]
        try:
            code, row.cpu_s = self._warm.run(
                "fctune.cli", arguments, row.config, environment, ROOT, log, self.seconds_left(row), stop
            )
        except TimeoutError:
            raise self.too_slow(row) from None
        return code

    def log(self, row: Row) -> Path:
        """Return the file with the output of a config's processes."""
        return self.folder / f"{row.config}.log"

    def too_slow(self, row: Row) -> ConfigFailure:
        """Return the failure of a config that exceeds its time."""
        return ConfigFailure(f"no end within the {self.limit_s:.0f} s of a config; see {self.log(row)}")

    def start(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        """Start a command in a session of its own, which ends with this process."""
        with open(log, "ab") as out:
            return subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
                preexec_fn=stop_with_parent(),
            )  # fmt: skip

    def wait(
        self, row: Row, processes: Sequence[subprocess.Popen[bytes]], poll: Callable[[], None] = lambda: None
    ) -> list[int]:
        """Return the exit codes of processes; kills them at the time limit."""
        try:
            while any(process.poll() is None for process in processes):
                if self.seconds_left(row) < 0:
                    raise self.too_slow(row)
                poll()
                time.sleep(0.05)
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        return [process.returncode for process in processes]

    def close(self) -> None:
        """End what is left."""
        self._warm.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON lines, without an unfinished last one."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line[-1] == "\n"]


def explain(run: Path, log: Path) -> str:
    """Return why a run failed: from its exit.json, or else the end of its output."""
    if (run / "exit.json").is_file():
        return " ".join(str(json.loads((run / "exit.json").read_text(encoding="utf-8"))["reason"]).split())[:600]
    return " ".join(log.read_text(encoding="utf-8", errors="replace").split())[-600:]


def check(condition: object, message: str) -> None:
    """Fail the config unless a condition holds."""
    if not condition:
        raise ConfigFailure(message)


def run_training(path: Path, runner: Runner, row: Row, compiles_again: bool) -> None:
    """Run a training config, and fill its row."""
    config = load_config(path)
    run, log = runner.folder / "runs" / path.stem, runner.log(row)
    overrides = override(path.stem, config, run)
    model_dir = ROOT / config.model.path
    if parse_name(config.model.path) is not None:
        with _models:
            model_dir = place_model(runner.folder / "hub", config.model.path, iter_texts())
    row.model, row.layers = model_name(config), describe_layers(model_dir)
    row.template = describe_template(config)
    if given := next((o for o in overrides if o.startswith("precision=")), None):
        row.precision = f"{given.partition('=')[2]}, because this processor emulates bfloat16"
    backend = "inductor" if path.stem in INDUCTOR else "aot_eager"
    row.compiled = backend if config.compile else "no"
    lines = train_in_two_parts(path, runner, row, overrides, backend if config.compile else None)
    check_metrics(config, lines)
    row.done += [what for what in ("validation", "evaluation") if any(key_of(what) in line for line in lines)]
    if config.compile:
        row.graphs = [line["compiled_graphs"] for line in lines[row.resumed_after :]]
        check_graphs(row.graphs, config.grpo is not None)
    prepared = None
    if config.grpo is None:
        record = json.loads((run / "run.json").read_text(encoding="utf-8"))
        prepared = open_prepared(Path(record["data"]["path"]))
        fill_counts(row, prepared)
    with _models:
        check_export(config, run / "export", model_dir, prepared, lines[-1])
    row.done.append("export")
    if compiles_again:
        row.compiled = f"no; with compile=true: {backend}"
        run = run.with_name(f"{path.stem}_compiled")
        again = [o for o in overrides if not o.startswith(("output_dir=", "max_steps=", "eval."))]
        again += [f"output_dir={run}", f"max_steps={COMPILED_STEPS}", "eval.every=0", "compile=true"]
        code = runner.train(row, path, again, backend)
        check(code == 0, f"with compile=true: exit code {code}: {explain(run, log)}")
        row.graphs = [line["compiled_graphs"] for line in read_lines(run / "metrics.jsonl")]
        check_graphs(row.graphs, config.grpo is not None)
        row.done.append("compile=true")


def describe_template(config: RunConfig) -> str:
    """Return the chat template of a run, and whether it is that of the config's model."""
    if config.model.chat_template is not None:
        return f"{config.model.chat_template}, as configured"
    if lacks_template(config):
        return f"template not run; {SHIPPED_TEMPLATE} instead"
    family = FAMILIES.get(model_name(config))
    return "its own" if family is None else f"its own ({family.template})"


def train_in_two_parts(
    path: Path, runner: Runner, row: Row, overrides: Sequence[str], backend: str | None
) -> list[dict[str, Any]]:
    """Train, stop after the first step, resume to the end, and return the metrics of all steps.

    The first step is not compiled, because the resumed run compiles the same blocks.
    """
    run, log = runner.folder / "runs" / row.config, runner.log(row)
    # Without an end of its own: a tiny model may take all steps before this busy process asks for the stop.
    endless = [o for o in overrides if not o.startswith("max_steps=")]
    code = runner.train(row, path, [*endless, "max_steps=1000", "compile=false"], backend, stops=True)
    check(code == STOPPED, f"run to be stopped: exit code {code}, expected {STOPPED}: {explain(run, log)}")
    row.steps = len(read_lines(run / "metrics.jsonl"))
    row.done += ["train", "stop"]
    total = row.steps + STEPS - 1
    code = runner.train(row, path, [*endless, f"max_steps={total}"], backend)
    check(code == 0, f"resumed run: exit code {code}: {explain(run, log)}")
    resumed = json.loads((run / "run.json").read_text(encoding="utf-8"))["resumed"][0]["step"]
    check(resumed == row.steps, f"resumed after step {resumed}, stopped after {row.steps}")
    lines = read_lines(run / "metrics.jsonl")
    steps = [line["step"] for line in lines]
    check(steps == list(range(1, total + 1)), f"steps {steps} of {total}")
    row.steps, row.resumed_after = len(lines), resumed
    row.done.append("resume")
    return lines


def key_of(what: str) -> str:
    """Return the metric that shows a validation or an evaluation."""
    return {"validation": "validation_loss", "evaluation": "eval_accuracy"}[what]


def check_metrics(config: RunConfig, lines: Sequence[Mapping[str, Any]]) -> None:
    """Check that losses are finite, and that the configured measurements were made."""
    check(all(math.isfinite(line["loss"]) for line in lines), f"losses {[line['loss'] for line in lines]}")
    if config.grpo is None and config.validation.every:
        check("validation_loss" in lines[-1], "no validation loss at the last step")
    if config.eval.every:
        check(key_of("evaluation") in lines[-1], f"no evaluation at the last step: {sorted(lines[-1])}")


def check_graphs(graphs: Sequence[int], has_rollouts: bool = False) -> None:
    """Check that blocks were compiled, and not again after a process's second step, the first of another layout.

    Batches of rollouts differ in the answers of a row, for any number of which torch compiles each graph once more.
    """
    check(graphs and graphs[0] > 0, f"graphs after each step {graphs}: nothing was compiled")
    if has_rollouts:
        check(graphs[-1] <= 2 * graphs[0], f"graphs after each step {graphs}: more than twice as many as in the first")
    else:
        check(len(set(graphs[1:])) <= 1, f"graphs after each step {graphs}: compiled again after the second")


def fill_counts(row: Row, prepared: PreparedSet) -> None:
    """Record how many rows became conversations of packs, and check that packs hold several."""
    counts = prepared.counts
    row.rows_read, row.rows_used = counts.rows, counts.conversations
    flat, ends = prepared.packs["train"]
    row.conversations_per_pack = round(len(flat) / max(1, len(ends) - 1), 2)
    fit = (row.rows_used + counts.overlong) / row.rows_read
    check(fit >= MIN_USED, f"{fit:.0%} of {row.rows_read} rows can be read and rendered, less than {MIN_USED:.0%}")
    used = row.rows_used / row.rows_read
    check(used >= MIN_SHORT, f"{row.rows_used} of {row.rows_read} rows ({used:.0%}) fit in {SEQ_LEN} tokens")
    if prepared.is_packed:
        check(row.conversations_per_pack > 1.5, f"{row.conversations_per_pack} conversations in a pack")


def check_export(
    config: RunConfig, export: Path, base: Path, prepared: PreparedSet | None, last: Mapping[str, Any]
) -> None:
    """Check that transformers loads the exports, that adapter and merged model agree, and their validation loss."""
    from peft import PeftModel
    from transformers import AutoConfig

    merged = load(export / "merged")
    tokens = torch.arange(3, 67)[None] % merged.config.get_text_config().vocab_size
    with torch.no_grad():
        logits = merged(input_ids=tokens).logits
        check(logits.isfinite().all(), "logits of the merged export are not finite")
        started = load(base)(input_ids=tokens).logits
        learned = last["grad_norm"] > 0  # dialogues of random weights may all be rewarded alike
        check(torch.equal(logits, started) != learned, "the merged export equals the base, or nothing was learned")
        # A base in 4 or 8 bits is merged as the run saw it, so PEFT merges the adapter into other weights.
        if config.adapter is not None and config.adapter.base == "bf16":
            adapted = PeftModel.from_pretrained(load(base), export / "adapter").merge_and_unload().eval()
            dtype = AutoConfig.from_pretrained(export / "merged").dtype
            for parameter in adapted.parameters():
                parameter.copy_(parameter.to(dtype))
            gap = float((adapted(input_ids=tokens).logits - logits).abs().max() / logits.abs().max())
            # A quantised base is exported as trained, so its weights are others than those that PEFT merges.
            is_same = gap < 1e-3 if config.adapter.base == "bf16" else math.isfinite(gap)
            check(is_same, f"base and adapter, merged by PEFT, are {gap:.1%} of the largest logit off the export")
        if prepared is not None and is_supervised(config) and prepared.num_packs("validation"):
            loss = measure_loss(merged, prepared)
            gap = abs(loss - last["validation_loss"]) / loss
            check(gap < 0.03, f"validation loss {last['validation_loss']:.4f}, in transformers {loss:.4f}")


def load(path: Path) -> Any:
    """Load a model in float32 with the class that PEFT's users load it with, for which adapters are written."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as TEXT_MODELS

    has_text_class = AutoConfig.from_pretrained(path).model_type in TEXT_MODELS
    kind = AutoModelForCausalLM if has_text_class else AutoModelForImageTextToText
    return kind.from_pretrained(path, dtype=torch.float32).eval()


def measure_loss(model: Any, prepared: PreparedSet) -> float:
    """Return the weighted mean loss of the validation split in transformers, one conversation at a time."""
    total = weight_sum = 0.0
    for index in prepared.packs["validation"][0]:
        span = slice(prepared.offsets[index], prepared.offsets[index + 1])
        tokens = torch.tensor(prepared.tokens[span].astype("int64"))
        weights = torch.tensor(prepared.weights[prepared.codes[span]])[1:]
        logits = model(input_ids=tokens[None]).logits[0, :-1]
        losses = torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="none")
        total += float((losses * weights).sum())
        weight_sum += float(weights.sum())
    return total / weight_sum


def run_one(path: Path, runner: Runner, compiles_again: bool) -> Row:
    """Run a config, and return its row; never raises."""
    row = Row(config=path.stem, digest="")
    runner.begin(row)
    started, own_cpu = time.monotonic(), time.thread_time()
    try:
        row.digest = digest_config(path)
        if path.stem.startswith("acceptance"):
            run_acceptance(path, runner, row)
        else:
            run_training(path, runner, row, compiles_again)
    except ConfigFailure as error:
        row.failure = str(error)
    except Exception as error:  # a library's, on loading what was exported
        row.failure = f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"
    row.seconds = round(time.monotonic() - started, 1)
    row.cpu_s = round(row.cpu_s + time.thread_time() - own_cpu, 1)
    if not row.failure:
        for run in (runner.folder / "runs").glob(f"{path.stem}*"):
            shutil.rmtree(run)
    return row


def run_acceptance(path: Path, runner: Runner, row: Row) -> None:
    """Run an acceptance config through its recipe: two processes, or two nodes of one, of this machine.

    Speeds are measured but not judged, as other processes share the cores; everything else is.
    """
    raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    out, nodes, log = runner.folder / "runs" / path.stem, raw.get("nodes", 1), runner.log(row)
    values: dict[str, Any] = {"thresholds": {}, "distinct_hosts": "false"}
    for disk in ("shared", "node", "network"):
        if f"{disk}_dir" in raw["storage"]:
            values[f"storage.{disk}_dir"] = runner.folder / "disks" / path.stem / disk
    if raw["device"] == "cuda":
        values |= {"device": "cpu", "gpu": "null", "ranks_per_node": 1, "required": ON_CPU, **SMALL_ACCEPTANCE}
        text = raw["training"]["architecture"]
        small = shrink(text, {"vocab_size": 1408}, keeps_depth=True)
        values |= {f"training.architecture.{key}": small[key] for key in text if small[key] != text[key]}
        row.layers = f"{text['num_hidden_layers']} {text['model_type']}"
    else:
        row.layers = "4 llama"
    row.template, row.steps = "-", raw["training"]["steps"]
    overrides = [
        f"{key}={json.dumps(value) if isinstance(value, list | dict) else value}" for key, value in values.items()
    ]
    environment = runner.environment(None)
    if nodes == 1:
        tune = str(Path(sys.executable).with_name("tune"))
        command = [tune, "run", "--nproc_per_node", "2", "recipes/cluster_acceptance", "--config", str(path)]
        processes = [runner.start([*command, f"output_dir={out}", *overrides], environment, log)]
    else:
        command = ["sky/acceptance_node.sh", str(path), str(out), *overrides]
        environment |= {"NUM_NODES": str(nodes), "DEVICES": "1", "PYTHON": sys.executable}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_port())}
        processes = [runner.start(command, environment | {"NODE_RANK": str(node)}, log) for node in range(nodes)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    codes = runner.wait(row, processes)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    row.cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    written = out / "acceptance.json"
    check(written.is_file(), f"exit codes {codes}: {explain(out, log)}")
    result = json.loads(written.read_text(encoding="utf-8"))
    check(codes == [0] * nodes, f"exit codes {codes}, {result['verdict']}: {result.get('reason')}")
    row.done = [each["name"] for each in result["checks"] if each["status"] != "SKIPPED"]


def find_port() -> int:
    """Return a free TCP port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def needs_compiling(paths: Sequence[Path]) -> set[str]:
    """Return the configs that ship uncompiled, one for each family that none compiles, and one with a reference."""
    kinds: dict[str, str | None] = {}
    configs = {path.stem: load_config(path) for path in paths if not path.stem.startswith("acceptance")}
    for name, config in sorted(configs.items(), key=lambda item: (not item[1].compile, item[0] not in INDUCTOR)):
        raw = find_public_config(model_name(config)) or {"model_type": "llama"}  # the tiny base
        kind = raw["model_type"] if config.preference is None else "preference"
        kinds.setdefault(kind, None if config.compile else name)
    return {name for name in kinds.values() if name is not None}


def read_versions() -> dict[str, str]:
    """Return the versions of the packages under test."""
    names = ("torch", "torchtune", "torchao", "transformers", "peft", "trl")
    return {name: importlib.metadata.version(name) for name in names} | {"python": platform.python_version()}


def digest_runner() -> str:
    """Return a digest of the files that decide what is run of a config."""
    files = [Path(__file__), *(Path(__file__).with_name(f"{name}.py") for name in ("deep_models", "warm_python"))]
    digest = hashlib.blake2b(digest_size=8)
    for path in [*files, *sorted(ROWS.glob("*.jsonl"))]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def render(rows: Iterable[Row]) -> str:
    """Return the table of all rows."""
    heads = ("config", "layers", "compiled", "graphs", "rows used", "template", "seconds", "of CPU", "result")
    cells = [heads]
    for row in rows:
        share = f"{row.rows_used} of {row.rows_read} ({row.rows_used / row.rows_read:.0%})" if row.rows_read else "-"
        graphs = str(max(row.graphs)) if row.graphs else "-"
        result = "FAILED" if row.failure else "ok"
        times = (f"{row.seconds:.0f}", f"{row.cpu_s:.0f}")
        cells.append((row.config, row.layers, row.compiled, graphs, share, row.template, *times, result))
    widths = [max(len(line[i]) for line in cells) for i in range(len(heads))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run configs, print the table, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("configs", nargs="*", help="names of shipped configs, or files; default: all shipped ones")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file to update")
    parser.add_argument("--folder", type=Path, help="working directory, kept; default: a temporary one")
    parser.add_argument("--workers", type=int, default=2, help="configs at a time, on a core each")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="SECONDS", help="for each config")
    parser.add_argument("--cold", action="store_true", help="start a new interpreter for each process of a run")
    arguments = parser.parse_args(argv)
    shipped = list_shipped_configs()
    known = {path.stem: path for path in shipped}
    chosen = [known.get(name, Path(name).absolute()) for name in arguments.configs] or shipped
    if unknown := [str(path) for path in chosen if not path.is_file()]:
        parser.error(f"no such config: {', '.join(unknown)}")
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="fctune-configs-"))
    folder.mkdir(parents=True, exist_ok=True)
    runner, again = Runner(folder, arguments.limit, arguments.cold), needs_compiling(shipped)
    versions, date = read_versions(), datetime.now(UTC).date().isoformat()
    digest = digest_runner()
    started, own = time.monotonic(), os.times()
    rows = []
    torch.set_num_threads(1)
    # The longest first, so that no core waits for the other at the end.
    chosen.sort(key=lambda path: LONGEST.index(path.stem) if path.stem in LONGEST else len(LONGEST))
    try:
        with ThreadPoolExecutor(arguments.workers) as pool:
            for done in as_completed([pool.submit(run_one, path, runner, path.stem in again) for path in chosen]):
                row = done.result()
                row.date, row.machine, row.runner, row.versions = date, describe_machine(), digest, versions
                rows.append(row)
                write_results(arguments.results, rows)
                print(f"{row.config}: {row.failure or 'ok'} ({row.seconds:.0f} s, {row.cpu_s:.0f} of CPU)", flush=True)
    finally:
        runner.close()
    rows.sort(key=lambda row: row.config)
    failed = [row for row in rows if row.failure]
    seconds, cpu_s = time.monotonic() - started, sum(os.times()[:4]) - sum(own[:4])
    print(f"\n{render(rows)}\n")
    for row in failed:
        print(f"{row.config}: {row.failure}\n")
    print(
        f"{len(rows) - len(failed)} of {len(rows)} configs ran in {seconds:.0f} s ({cpu_s:.0f} s of CPU) "
        f"with torch {versions['torch']} and transformers {versions['transformers']}"
    )
    if failed:
        print(f"outputs: {folder}")
    elif arguments.folder is None:
        shutil.rmtree(folder)
    return 1 if failed else 0


def write_results(path: Path, rows: Sequence[Row]) -> None:
    """Write rows of shipped configs in place of earlier ones; the others stay, with the runner that made them."""
    shipped = {config.stem for config in list_shipped_configs()}
    known: dict[str, Any] = {}
    if path.is_file():
        known = {row["config"]: row for row in json.loads(path.read_text(encoding="utf-8"))}
    known |= {row.config: asdict(row) for row in rows}
    kept = [known[config] for config in sorted(known.keys() & shipped)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{json.dumps(kept, indent=1, ensure_ascii=False)}\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
