"""Measure whether a model calls the right function with the right arguments.

    python -m eval.tool_calls --model DIR --cases FILE [--adapter DIR] [--out FILE] [--format NAME]

Answers are generated greedily in this process, read strictly in the wire format of the model's chat template, and
compared with the expected calls: names and typed arguments, order-free. Nothing that a model wrote is ever run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from fctune.calls.cases import Case, read_cases
from fctune.calls.formats import CallFormat, detect_format, get_format
from fctune.calls.score import Outcome, judge, score
from fctune.errors import CheckpointError, ConfigError, DataError
from fctune.generation.engine import Answer, InProcessEngine


def main(argv: list[str] | None = None) -> int:
    """Run the evaluation; 0 done, 1 below --min-accuracy, 2 wrong usage or input."""
    arguments = _parse(argv)
    console = Console()
    try:
        cases = read_cases(arguments.cases)[: arguments.limit]
        engine = InProcessEngine(arguments.model, arguments.adapter, arguments.batch_size)
        call_format = get_format(arguments.format) if arguments.format else detect_format(engine.template.source)
        answers = engine.answer([case.prompt for case in cases], arguments.max_new_tokens)
        label = f"answering {len(cases):,} cases"
        shown = track(answers, label, total=len(cases), console=console, disable=not console.is_terminal)
        results = sorted(
            (_judge_case(cases[answer.index], answer, call_format) for answer in shown), key=lambda r: r["place"]
        )
        summary = _summarise(results, arguments, call_format)
        if arguments.out:
            _write(Path(arguments.out), results, summary)
    except (ConfigError, DataError, CheckpointError) as error:
        print(error, file=sys.stderr)
        return 2
    console.print(_table(arguments.model, summary))
    if arguments.out:
        console.print(f"each case: {arguments.out}", soft_wrap=True)
    accuracy = summary["scores"]["all"]["rates"]["accuracy"]["rate"]
    if arguments.min_accuracy is not None and accuracy < arguments.min_accuracy:
        console.print(f"accuracy {accuracy:.1%} is under the {arguments.min_accuracy:.0%} asked for", style="bold red")
        return 1
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.tool_calls", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", required=True, help="Hugging Face model directory, such as a run's export/merged")
    parser.add_argument("--cases", required=True, help="JSONL: messages, tools, expected_calls[, id, kind]")
    parser.add_argument("--adapter", help="PEFT adapter directory on top of --model")
    parser.add_argument("--out", help="write each case's prompt, answer, calls and verdict here (JSONL), and a summary")
    parser.add_argument("--format", help="wire format of calls; default: found from the chat template")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--limit", type=int, help="only the first N cases")
    parser.add_argument("--min-accuracy", type=float, help="exit 1 below this, e.g. 0.85")
    return parser.parse_args(argv)


def _judge_case(case: Case, answer: Answer, call_format: CallFormat) -> dict[str, Any]:
    parsed = call_format.parse(answer.text, case.prompt.tools)
    outcome = judge(case.expected, parsed)
    return {
        "place": answer.index,
        "outcome": outcome,
        "row": {
            "id": case.id,
            "category": case.category,
            "verdict": outcome.verdict,
            "answer": answer.text,
            "is_cut": answer.is_cut,
            "calls": [{"name": c.name, "arguments": c.arguments} for c in parsed.calls],
            "malformed": [m.reason for m in parsed.malformed],
            "expected_calls": [{"name": c.name, "arguments": c.arguments} for c in case.expected],
            "messages": [message.to_openai() for message in case.prompt.messages],
        },
    }


def _summarise(results: list[dict[str, Any]], arguments: argparse.Namespace, call_format: CallFormat) -> dict[str, Any]:
    outcomes: dict[str, list[Outcome]] = defaultdict(list)
    for result in results:
        outcomes[result["row"]["category"]].append(result["outcome"])
        outcomes["all"] += [result["outcome"]] if result["row"]["category"] != "all" else []
    names = sorted(outcomes, key=lambda name: (name == "all", name))
    return {
        "model": str(arguments.model),
        "adapter": arguments.adapter,
        "cases": str(arguments.cases),
        "format": call_format.name,
        "scores": score({name: outcomes[name] for name in names}),
    }


def _write(out: Path, results: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        rows = "".join(json.dumps(result["row"], ensure_ascii=False) + "\n" for result in results)
        out.write_text(rows, encoding="utf-8")
        out.with_suffix(".summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written ({error.strerror}).") from None


def _table(model: str, summary: dict[str, Any]) -> Table:
    table = Table(title=f"tool-call accuracy of {model}", title_justify="left")
    for name in ("category", "n", "accuracy", "95 % interval", "what went wrong"):
        table.add_column(name, justify="right" if name in ("n", "accuracy", "95 % interval") else "left")
    for category, scores in summary["scores"].items():
        rate = scores["rates"]["accuracy"]
        wrong = {v: n for v, n in scores["verdicts"].items() if n and v != "correct"}
        table.add_row(
            category,
            str(scores["n"]),
            f"{rate['rate']:.1%}",
            f"{rate['low']:.1%} - {rate['high']:.1%}",
            ", ".join(f"{n} {v}" for v, n in wrong.items()),
            style="bold" if category == "all" else "",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
