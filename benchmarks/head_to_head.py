"""Compare the accuracy that fctune and other tools reach on the same model, rows, tokens and adapters.

    python -m benchmarks.head_to_head --model DIR --rows DIR [--tokens N] [--limit N] [--vllm PYTHON] [--defaults]
        [--tokens-off] [--same-rate] [--llamafactory PYTHON] [--axolotl PYTHON] [--out DIR] [key=value ...]

--rows is the data directory of ``make real``. fctune and TRL's SFTTrainer train the first N tokens of its rows that fit
into a pack, with the config of ``make real``: the same adapter, optimizer, schedule and precision, packs of the same
length, and as many of them a step. TRL gets the rows as it renders them rightly (``benchmarks.peer_rows`` compares):
arguments as objects, read by ``load_dataset``, its training template, ``assistant_only_loss``; it packs where no
conversation attends to another, which is tried.

Both train a quarter of the tokens with each of three learning rates, of which the best on the validation share trains
all tokens with several seeds: by the harmonic mean of the accuracies where a call is due and where none is, since a
plain mean rewards a model that calls nothing. One judge measures all results as merged models, in process or
served by one vLLM. --defaults also trains each tool as it is without any setting: fctune with its shipped config; TRL
with SFTConfig's defaults, which train all weights, on rows as OpenAI's API returns them.

fctune also trains the embedding rows of markers that the base has never learned. --tokens-off shows what that gives, by
one more training of fctune without it (``adapter.train_tokens=off``), with seed 1. TRL cannot do it: its loss reads
``lm_head.bias``, which PEFT's layer for ``trainable_token_indices`` does not have. --same-rate also trains with TRL and
the learning rate that was chosen for fctune, with seed 1, as a search that finds no right call chooses little.

--llamafactory and --axolotl name the Python of an environment that has the tool. Each trains all tokens once, after the
pairs, with seed 1, the same settings, and the learning rate that was chosen for TRL, as these tools are transformers'
Trainer with PEFT, too. ``benchmarks.head_to_head_peers`` says what differs. If a training fails, the report has the
last line of the tool's output, and the same command tries it again.

Accuracies are means over seeds; their 95% intervals are Wilson's for the number of cases, as a case with several seeds
is no more than one case. ``p`` is of the exact sign-flip test over cases: each case has the number of seeds in which
fctune is right minus that in which the other is, and the sign of each is equally likely if the tools are equal. With
one seed that is McNemar's exact test. Neither covers how much trainings with other seeds would differ: see the means by
seed.

Each training is a process of its own. Each part (training, merging, measuring) has a file under --out and is skipped
when it is there: after a kill, the same command resumes with the part that was interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.head_to_head_peers import COMMANDS, LOG
from benchmarks.head_to_head_trl import Job
from benchmarks.peer_rows import find_version, to_form
from benchmarks.real_arguments import add_model_options, check_model, run_benchmark
from benchmarks.real_measuring import CATEGORIES, UNSEEN, SplitName, Subject, answers_dir, load_suites, measure
from benchmarks.real_model import find_public_files, run_module, train_once
from benchmarks.real_summary import average_by_kind, balance_accuracy, is_call_due
from benchmarks.training import PACKAGES, describe_machine, keep
from fctune.base.errors import CheckpointError, ConfigError, DataError
from fctune.base.files import write_atomically
from fctune.calls.metrics import wilson_interval
from fctune.config.loading import load_config
from fctune.data.chat_template import ChatTemplate
from fctune.data.conversation import Conversation
from fctune.data.sources import read_source
from fctune.models.hub import digest_model
from fctune.tasks.evaluation.paired import paired_difference_interval
from fctune.tasks.judge import is_valid

TOOLS = ("fctune", "trl")  # which are compared over all seeds
# Both with the learning rate of fctune: fctune with adapter.train_tokens=off, and TRL.
TOKENS_OFF, SAME_RATE = "tokens_off", "same_rate"
NAMES = {
    "fctune": "fctune",
    "trl": "TRL",
    TOKENS_OFF: "fctune, train_tokens=off",
    SAME_RATE: "TRL, fctune's rate",
    "llamafactory": "LLaMA-Factory",
    "axolotl": "axolotl",
}
_VARIANTS = {
    TOKENS_OFF: "also train fctune without the rows of untrained tokens",
    SAME_RATE: "also train with TRL and the learning rate that was chosen for fctune",
}
LEARNING_RATES = (1e-4, 2e-4, 4e-4)
SEARCH_SHARE = 4  # the search for a learning rate trains this fraction of the tokens
_SEARCH_SEED = 0
_QWEN = "You are Qwen, created by Alibaba Cloud"  # in the template
_COUNTS = {
    "steps": "steps",
    "tokens": "tokens",
    "supervised_tokens": "supervised",
    "trained_parameters": "trained weights",
    "training_s": "training, s",
    "wall_s": "wall, s",
    "tokens_per_s": "tokens/s",
    "peak_gib": "peak, GiB",
}
_COMPARED = (  # options that the results depend on
    *("rows", "config", "overrides", "tokens", "seeds", "learning_rates", "limit", "validation_limit", "categories"),
    *("public_sets", "vllm_options", "max_new_tokens"),
)


@dataclass(frozen=True)
class Training:
    """A training of the comparison.

    Attributes:
        tool: Of ``NAMES``.
        stage: ``search``, with a quarter of the tokens; ``full``; or ``defaults``, with all tokens.
        seed: Of the adapter and of the order of rows.
        learning_rate: None: the tool's default.
    """

    tool: str
    stage: str
    seed: int
    learning_rate: float | None = None

    @property
    def name(self) -> str:
        """Name of its directory."""
        rate = "" if self.learning_rate is None else f"-{self.learning_rate:g}"
        return f"{self.tool}-{self.stage}{rate}-seed{self.seed}"

    @property
    def is_fctune(self) -> bool:
        """True if fctune trains, with or without the rows of untrained tokens."""
        return self.tool in ("fctune", TOKENS_OFF)

    @property
    def split(self) -> SplitName:
        """Cases that it is measured on."""
        return "validation" if self.stage == "search" else "test"


def write_rows(arguments: argparse.Namespace, model_dir: Path) -> dict[str, Any]:
    """Write the rows of both sizes in both forms of arguments, and return how many tokens they have.

    Raises:
        ConfigError: The config has no length of a pack.
        DataError: There are fewer tokens than asked for.
    """
    encoder = ChatTemplate(model_dir).encoder
    seq_len = load_config(arguments.config, arguments.overrides).data.seq_len
    if isinstance(seq_len, str):
        raise ConfigError(f"data.seq_len={seq_len}: TRL needs a number; pass data.seq_len=2048.")
    rows: list[dict[str, Any]] = []
    lengths: list[int] = []
    found: dict[str, Any] = {}
    sizes = {"search": arguments.tokens // SEARCH_SHARE, "full": arguments.tokens}
    for conversation in read_source(str(arguments.rows / "train.jsonl")):
        if not isinstance(conversation, Conversation):
            continue
        samples = encoder.encode(conversation)
        if any(len(sample.tokens) > seq_len for sample in samples):  # fctune would leave it out, and TRL cut it
            continue
        rows.append(conversation.to_openai())
        lengths.append(sum(len(sample.tokens) for sample in samples))
        for size in [name for name, tokens in sizes.items() if name not in found and sum(lengths) >= tokens]:
            for form in ("objects", "strings"):
                text = "".join(json.dumps(to_form(row, form)) + "\n" for row in rows)
                write_atomically(arguments.out / "rows" / f"{size}_{form}.jsonl", text)
            found[size] = {
                "rows": len(rows),
                "tokens": sum(lengths),
                "longer_than_1024": sum(n > 1024 for n in lengths),
            }
        if len(found) == len(sizes):
            return found
    raise DataError(f"--tokens {arguments.tokens}: {arguments.rows / 'train.jsonl'} has only {sum(lengths):,}.")


def train(training: Training, arguments: argparse.Namespace, model_dir: Path, folder: Path) -> dict[str, Any]:
    """Train from the start, as the time of an interrupted training would not be comparable; returns what was counted.

    Raises:
        CheckpointError: The training failed.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    form = "strings" if training.stage == "defaults" else "objects"
    rows = arguments.out / "rows" / f"{'search' if training.stage == 'search' else 'full'}_{form}.jsonl"
    keys = [f"model.path={model_dir}", f"data.sources={json.dumps([{'path': str(rows)}])}", f"seed={training.seed}"]
    if training.stage != "defaults":  # every row is trained, and time and memory are those of training
        keys += [f"optimizer.lr={training.learning_rate}", "data.validation_share=0", "validation.every=0"]
        keys += ["success=null", "eval.every=0", *arguments.overrides]
    started = time.perf_counter()
    if training.tool == TOKENS_OFF:
        keys.append("adapter.train_tokens=off")
    if training.is_fctune:
        train_once(arguments.config, folder / "run", keys)
        result = _count_fctune(folder / "run")
    else:
        settings = None if training.stage == "defaults" else load_config(arguments.config, keys).to_dict()
        python = getattr(arguments, training.tool) if training.tool in COMMANDS else None
        job = Job(str(model_dir), str(rows), str(folder), training.seed, settings, training.tool, python)
        write_atomically(folder / "job.json", json.dumps(asdict(job)))
        run_step("train", training, folder)
        result = json.loads((folder / "result.json").read_text())
    wall, tokens = time.perf_counter() - started, result["tokens"]
    return result | {"wall_s": wall, "tokens_per_s": None if tokens is None else tokens / result["training_s"]}


def run_step(step: str, training: Training, folder: Path) -> None:
    """Train or merge the job in a folder, in a process of its own.

    Raises:
        CheckpointError: It failed.
    """
    is_elsewhere = step == "train" and training.tool in COMMANDS
    module = "benchmarks.head_to_head_peers" if is_elsewhere else "benchmarks.head_to_head_trl"
    if not (code := run_module(module, step, folder / "job.json")):
        return
    said = "its own message is above."
    if is_elsewhere and (folder / LOG).is_file():
        lines = [line for line in (folder / LOG).read_text(errors="replace").splitlines() if line.strip()]
        said = f"{LOG} ends with: {lines[-1].strip()}" if lines else f"{LOG} is empty."
    raise CheckpointError(f"{folder.name}: {NAMES[training.tool]} ended with code {code}; {said}")


def _count_fctune(run: Path) -> dict[str, Any]:
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [one for one in steps if "loss" in one]
    described = json.loads((run / "run.json").read_text())
    prepared = json.loads((Path(described["data"]["path"]) / "meta.json").read_text())["counts"]
    return {
        "is_packed": described["config"]["data"]["packed"],
        "trained_parameters": described["parameters"]["trained"],
        "steps": len(steps),
        "tokens": sum(one["tokens_total"] for one in steps),
        "supervised_tokens": sum(one["tokens_supervised"] for one in steps),
        "training_s": sum(one["step_time_s"] for one in steps),
        "peak_gib": max(one["peak_memory_gib"] for one in steps),
        "losses": [one["loss"] for one in steps],
        "rows": {key: prepared[key] for key in ("rows", "samples", "invalid", "overlong", "cut", "unsupervised")},
    }


def find_merged(training: Training, folder: Path) -> Path:
    """Return the merged model of a training, merging it if that is missing."""
    if training.is_fctune:
        return folder / "run" / "export" / "merged"
    if not (folder / "merged").is_dir():
        run_step("merge", training, folder)
    return folder / "merged"


def train_and_measure(training: Training, arguments: argparse.Namespace, model_dir: Path) -> dict[str, Any]:
    """Do what is missing of a training, and return its counts and the verdicts by category and case.

    The models are deleted once they are measured, unless ``--keep-models`` is given.
    """
    folder = arguments.out / "trainings" / training.name
    answers = answers_dir(arguments.out, training.split) / training.name

    def finish() -> dict[str, Any]:
        trained = keep(arguments.out / "trainings" / f"{training.name}.json",
                       lambda: train(training, arguments, model_dir, folder))  # fmt: skip
        suites = load_measured(training.split, arguments)
        verdicts: dict[str, dict[str, bool]] = {}
        for row in measure(Subject(find_merged(training, folder)), suites, answers, arguments):
            verdicts.setdefault(row["category"], {})[row["id"]] = is_valid(row)
        return {**asdict(training), "trained": trained, "verdicts": verdicts}

    found = keep(arguments.out / "measured" / f"{training.name}.json", finish)
    if not arguments.keep_models:
        shutil.rmtree(folder, ignore_errors=True)
    return found


def load_measured(split: SplitName, arguments: argparse.Namespace) -> list[Any]:
    """Load the cases of a split."""
    public = [file.stem for file in find_public_files(arguments.rows)] if arguments.public_sets else []
    categories = arguments.categories or [*CATEGORIES, UNSEEN, *public]
    if split == "validation":
        categories = [name for name in categories if name in (*CATEGORIES, UNSEEN)]
    limit = arguments.limit if split == "test" else arguments.validation_limit
    return load_suites(arguments.rows, split, categories, limit or None, arguments.bfcl_data, bool(arguments.vllm))


def measure_accuracies(verdicts: dict[str, dict[str, bool]]) -> dict[str, float]:
    """Return the share that is right by category."""
    return {category: statistics.mean(of_category.values()) for category, of_category in verdicts.items()}


def mean_accuracy(verdicts: dict[str, dict[str, bool]]) -> float:
    """Return the mean over categories of the share that is right."""
    return statistics.mean(measure_accuracies(verdicts).values())


def choose_rate(searches: Sequence[dict[str, Any]]) -> float:
    """Return the learning rate of the best training of a search.

    Of several without balanced accuracy it is the one with the most right calls, as a model that calls nothing may have
    learned nothing; of equal ones, that with the lowest mean loss, as all train the same rows in the same order.
    """

    def rank(one: dict[str, Any]) -> tuple[float, float, float]:
        accuracies = measure_accuracies(one["verdicts"])
        right_calls = average_by_kind(accuracies).get(True, 0.0)
        return balance_accuracy(accuracies), right_calls, -statistics.mean(one["trained"]["losses"])

    return float(max(searches, key=rank)["learning_rate"])


def sign_flip_p(differences: Sequence[int]) -> float:
    """Return the two-sided p-value of the exact sign-flip test, in which each difference has either sign equally often.

    If the differences are -1, 0 and 1, that is McNemar's exact test.
    """
    ways = {0: 1}  # number of sign choices by sum
    for one in differences:
        sums: dict[int, int] = {}
        for total, count in ways.items():
            for change in (one, -one):
                sums[total + change] = sums.get(total + change, 0) + count
        ways = sums if one else ways
    extreme = sum(count for total, count in ways.items() if abs(total) >= abs(sum(differences)))
    return float(extreme / sum(ways.values()))


def compare(fctune: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Compare trainings of two tools by category, by whether a call is due, and in all; see the module for seeds.

    Args:
        fctune: Results of ``train_and_measure``.
        others: As many of another tool, on the same cases.

    Raises:
        DataError: They are of different cases, or not equally many.
    """
    other = others[0]["tool"] if others else "no tool"
    if len({one["seed"] for one in fctune}) != len(fctune) or len(fctune) != len(others):
        raise DataError(f"{len(fctune)} trainings of fctune and {len(others)} of {other} cannot be compared.")
    runs = {"fctune": fctune, other: others}
    categories = list(fctune[0]["verdicts"])
    right: dict[str, dict[str, dict[str, int]]] = {}  # number of seeds by tool, category and case
    for tool, results in runs.items():
        right[tool] = {}
        for category in categories:
            cases = [one["verdicts"].get(category, {}) for one in results]
            if any(one.keys() != fctune[0]["verdicts"][category].keys() for one in cases):
                raise DataError(f"{category}: the trainings were measured on different cases. Pass another --out.")
            right[tool][category] = {case: sum(one[case] for one in cases) for case in cases[0]}
    num_seeds = len(fctune)
    pairs = {
        category: [[right[tool][category][case] for tool in runs] for case in right["fctune"][category]]
        for category in categories
    }
    means = {tool: [mean_accuracy(one["verdicts"]) for one in results] for tool, results in runs.items()}
    kinds: dict[str, list[list[int]]] = {}
    for category, of_it in pairs.items():
        kinds.setdefault("a call is due" if is_call_due(category) else "none is due", []).extend(of_it)
    return {
        "seeds": num_seeds,
        "categories": {name: _compare_category(tuple(runs), of_it, num_seeds) for name, of_it in pairs.items()},
        "kinds": {name: _compare_category(tuple(runs), of_it, num_seeds) for name, of_it in kinds.items()},
        "all_cases": _compare_category(tuple(runs), [pair for of_it in pairs.values() for pair in of_it], num_seeds),
        "mean_over_categories_by_seed": means,
    }


def _compare_category(tools: Sequence[str], pairs: Sequence[Sequence[int]], num_seeds: int) -> dict[str, Any]:
    n = len(pairs)
    one: dict[str, Any] = {"n": n}
    for index, tool in enumerate(tools):
        successes = sum(pair[index] for pair in pairs) / num_seeds
        low, high = wilson_interval(successes, n)
        one[tool] = {"accuracy": successes / n, "low": low, "high": high}
    differences = [ours - theirs for ours, theirs in pairs]
    better, worse = (sum(max(0, sign * d) for d in differences) / num_seeds for sign in (1, -1))
    one["difference"] = [(better - worse) / n, *paired_difference_interval(better, worse, n)]
    return one | {"p": sign_flip_p(differences)}


def format_report(report: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    titles = {
        "full": "Best learning rate",
        "defaults": "Untouched defaults",
        "one_seed": "All tools, with one seed each",
    }
    parts = []
    for stage, title in titles.items():
        if stage in report:
            compared = report[stage] if stage == "one_seed" else {"trl": report[stage]}
            parts += [f"### {title}", _format_accuracy(compared)]
    heads = ("", "stage", "learning rate", "seed", *_COUNTS.values(), "mean accuracy")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for one in report["trainings"]:
        rate = "default" if one["learning_rate"] is None else f"{one['learning_rate']:g}"
        cells = [_format_count(one.get("trained", {}).get(key)) for key in _COUNTS]
        accuracy = "failed" if "failed" in one else f"{one['mean_accuracy']:.1%}"
        cells = [one["tool"], one["stage"], rate, str(one["seed"]), *cells, accuracy]
        lines.append(f"| {' | '.join(cells)} |")
    parts += ["### Trainings", "\n".join(lines)]
    parts += [one["failed"] for one in report["trainings"] if "failed" in one]
    kinds = ["| TRL's form of the rows | what it does |", "|---|---|"]
    kinds += [
        f"| {name} | {json.dumps(one.get('kinds', one.get('refused')))} |"
        for name, one in report["rows"]["in_trl"].items()
    ]
    parts += ["### Rows", "\n".join(kinds)]
    return "\n\n".join(parts)


def _format_count(count: float | None) -> str:
    if count is None:
        return "-"
    return f"{count:,.1f}" if isinstance(count, float) else f"{count:,}"


def _format_accuracy(compared: dict[str, Any]) -> str:
    """Return a table of fctune and the tools that are compared with it on the same cases."""
    first = next(iter(compared.values()))
    heads = ["", "cases", "fctune", *(head for tool in compared for head in (NAMES[tool], "difference", "p"))]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    tables = {
        tool: {**one["categories"], **one["kinds"], "all cases": one["all_cases"]} for tool, one in compared.items()
    }
    for name, row in next(iter(tables.values())).items():
        cells = [name, str(row["n"]), _format_share(row["fctune"])]
        for tool, one in ((tool, table[name]) for tool, table in tables.items()):
            difference = "{:+.0%} ({:+.0%} to {:+.0%})".format(*one["difference"])
            cells += [_format_share(one[tool]), difference, f"{one['p']:.2g}"]
        lines.append(f"| {' | '.join(cells)} |")
    cells = ["mean over categories (by seed)", "", _format_means(first, "fctune")]
    for tool, one in compared.items():
        cells += [_format_means(one, tool), "", ""]
    return "\n".join([*lines, f"| {' | '.join(cells)} |"])


def _format_share(share: dict[str, float]) -> str:
    return "{accuracy:.0%} ({low:.0%} - {high:.0%})".format(**share)


def _format_means(compared: dict[str, Any], tool: str) -> str:
    means = compared["mean_over_categories_by_seed"][tool]
    return f"{statistics.mean(means):.1%} ({', '.join(f'{m:.1%}' for m in means)})"


def _compare_rows(arguments: argparse.Namespace, model_dir: Path, num_rows: int) -> dict[str, Any]:
    """Return what TRL makes of the rows of the full trainings."""
    file = arguments.out / "rows" / "in_trl.json"
    data = arguments.out / "rows" / "full_strings.jsonl"
    options = ("--model", model_dir, "--data", data, "--limit", num_rows, "--result", file)
    if not file.is_file() and (code := run_module("benchmarks.peer_rows", *options)):
        raise CheckpointError(f"benchmarks.peer_rows: ended with code {code}; its own message is above.")
    found: dict[str, Any] = json.loads(file.read_text())["variants"]
    return found


def iter_results(arguments: argparse.Namespace, model_dir: Path) -> Iterator[dict[str, Any]]:
    """Yield the results of the search, of the full trainings in turns, so that a kill leaves pairs, of defaults, and of
    the tools that train once, which may fail.
    """
    rates = {}
    for tool in TOOLS:
        searches = []
        for rate in arguments.learning_rates:
            searches.append(train_and_measure(Training(tool, "search", _SEARCH_SEED, rate), arguments, model_dir))
            yield searches[-1]
        rates[tool] = choose_rate(searches)
        print(f"{tool}: best learning rate {rates[tool]:g}", flush=True)
    for seed in range(1, arguments.seeds + 1):
        for tool in TOOLS:
            yield train_and_measure(Training(tool, "full", seed, rates[tool]), arguments, model_dir)
    for tool in TOOLS if arguments.defaults else ():
        yield train_and_measure(Training(tool, "defaults", 1), arguments, model_dir)
    for tool in [tool for tool in (*_VARIANTS, *COMMANDS) if getattr(arguments, tool)]:
        training = Training(tool, "full", 1, rates["fctune" if tool in _VARIANTS else "trl"])
        try:
            yield train_and_measure(training, arguments, model_dir)
        except CheckpointError as error:
            print(error, file=sys.stderr, flush=True)
            yield {**asdict(training), "failed": str(error)}


def summarize(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the part of the report that follows from the results of all trainings until now."""
    found: dict[str, Any] = {"trainings": []}
    for one in results:
        mean = {} if "failed" in one else {"mean_accuracy": mean_accuracy(one["verdicts"])}
        found["trainings"].append({key: value for key, value in one.items() if key != "verdicts"} | mean)
    for stage in ("full", "defaults"):
        ours, theirs = ([one for one in results if (one["tool"], one["stage"]) == (tool, stage)] for tool in TOOLS)
        if theirs:  # the later of the two
            found[stage] = compare(ours[: len(theirs)], theirs)
    first = {one["tool"]: one for one in results if (one["stage"], one["seed"]) == ("full", 1) and "failed" not in one}
    if first.keys() & {*_VARIANTS, *COMMANDS}:
        found["one_seed"] = {tool: compare([first["fctune"]], [one]) for tool, one in first.items() if tool != "fctune"}
    return found


def check_peers(arguments: argparse.Namespace, model_dir: Path) -> dict[str, str]:
    """Return the versions of the tools in other environments.

    Raises:
        ConfigError: An environment does not have its tool, or the tool has no such settings.
    """
    pythons = {tool: getattr(arguments, tool) for tool in COMMANDS if getattr(arguments, tool)}
    if pythons and load_config(arguments.config, arguments.overrides).lr_scheduler.min_factor:
        raise ConfigError(f"lr_scheduler.min_factor: --{next(iter(pythons))} needs 0, as the tool decays to it.")
    if arguments.llamafactory and _QWEN not in ChatTemplate(model_dir).source:
        raise ConfigError("--llamafactory: its template is that of Qwen2.5, which the model's is not.")
    return {tool: find_version(tool, python) for tool, python in pythons.items()}


def run(arguments: argparse.Namespace) -> str:
    """Do what is missing of the comparison, write it after each pair of trainings, and return its tables.

    Raises:
        ConfigError: An option is wrong, or results there are of something else.
        DataError: The rows are missing or too few.
        CheckpointError: A training failed.
    """
    if not (arguments.rows / "train.jsonl").is_file():
        raise ConfigError(
            f"--rows {arguments.rows}: no train.jsonl. Run `make real` first, or pass its data directory."
        )
    for option, least in (("tokens", SEARCH_SHARE), ("seeds", 1), ("validation_limit", 0)):
        if getattr(arguments, option) < least:
            raise ConfigError(f"--{option.replace('_', '-')} {getattr(arguments, option)}: expected {least} or more.")
    model_dir = check_model(arguments).resolve()
    if arguments.chat_template is not None:
        raise ConfigError("--chat-template: TRL trains with the template of the model; pass a model that has one.")
    versions = {name: version(name) for name in PACKAGES} | check_peers(arguments, model_dir)
    for split in ("test", "validation"):
        load_measured(split, arguments)  # what is missing is known before hours of work
    for name in ("rows", "trainings", "measured"):
        (arguments.out / name).mkdir(exist_ok=True)
    settings = {key: str(getattr(arguments, key)) for key in _COMPARED} | {"model": digest_model(model_dir)}
    if keep(arguments.out / "settings.json", lambda: settings) != settings:
        raise ConfigError(f"{arguments.out}: contains a comparison with other options. Pass another --out.")
    counts = keep(arguments.out / "rows" / "counts.json", lambda: write_rows(arguments, model_dir))
    report: dict[str, Any] = {
        "command": "python -m benchmarks.head_to_head",
        "settings": {key: value for key, value in settings.items() if key != "rows"}
        | {"config": Path(arguments.config).name},  # without this machine's paths
        "versions": versions,
        "rows": {"counts": counts, "in_trl": _compare_rows(arguments, model_dir, counts["full"]["rows"])},
    }
    results: list[dict[str, Any]] = []
    for result in iter_results(arguments, model_dir):
        results.append(result)
        report |= summarize(results)
        report |= {"date": time.strftime("%Y-%m-%d"), "machine": describe_machine()}
        write_atomically(arguments.out / "head_to_head.json", json.dumps(report, indent=1) + "\n")
        write_atomically(arguments.out / "head_to_head.md", format_report(report) + "\n")
    return format_report(report)


def _find_python(name: str) -> str:
    """Return the path of an interpreter; links are kept, as they belong to its environment."""
    return os.path.abspath(shutil.which(name) or name)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison; 0 done, 2 wrong input, 130 interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.head_to_head",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_options(parser)
    parser.add_argument("--rows", type=Path, required=True, metavar="DIR", help="data directory of `make real`")
    parser.add_argument("--tokens", type=int, default=240_000, metavar="N", help="of a training; default: %(default)s")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="full trainings; default: %(default)s")
    parser.add_argument("--learning-rates", type=float, nargs="+", default=LEARNING_RATES, metavar="X")
    parser.add_argument("--validation-limit", type=int, default=20, metavar="N", help="cases a category of the search")
    parser.add_argument("--public-sets", action="store_true", help="also measure the public sets in --rows")
    for tool, words in _VARIANTS.items():
        parser.add_argument(f"--{tool.replace('_', '-')}", action="store_true", help=words)
    parser.add_argument("--defaults", action="store_true", help="also train with each tool's defaults")
    for tool in COMMANDS:
        words = f"also train with {NAMES[tool]}, which this Python has"
        parser.add_argument(f"--{tool}", type=_find_python, metavar="PYTHON", help=words)
    parser.add_argument("--keep-models", action="store_true", help="keep the models that were measured")
    parser.set_defaults(out=Path("runs/head_to_head"), limit=100)
    arguments = parser.parse_intermixed_args(argv)
    arguments.out, arguments.rows = arguments.out.resolve(), arguments.rows.resolve()
    return run_benchmark(lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())
