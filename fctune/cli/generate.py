"""``fctune data generate``: rows from tools alone, written by a teacher."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shlex
import signal
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fctune.apps.generate.kinds import KINDS
from fctune.base.errors import ConfigError
from fctune.base.signals import handle_signal
from fctune.base.terminal import Terminal
from fctune.cli.data_rows import add_redact_arguments, make_redact_config, read_redact
from fctune.cli.files import write_file
from fctune.config.intervals import format_count, parse_share
from fctune.config.loading import read_environment
from fctune.config.parsing import suggest
from fctune.config.server_address import parse_base_url

if TYPE_CHECKING:
    from fctune.apps.generate.plan import Planner
    from fctune.apps.generate.run import Report
    from fctune.apps.generate.teacher import Asker, Budget
    from fctune.engines.mcp_tools import McpTool, OfferedTools


def add_generate(data: Any) -> None:
    """Add ``fctune data generate`` to the commands of ``fctune data``."""
    generate = data.add_parser(
        "generate",
        help="write rows for tools that have none, with a teacher model",
        description="Write rows for tools that have none. A teacher writes requests and answers each several times "
        "without seeing what it intended; a row is kept if the calls are valid, agree and are the intended ones. No "
        "tool is ever called unless --execute names it and its MCP server declares it read-only.",
    )
    generate.add_argument(
        "--tools",
        action="append",
        required=True,
        metavar="FILE|URL|stdio: COMMAND",
        help="tools as JSON in any form that rows may have, an OpenAPI 3 document, the URL of an MCP server, whose "
        "token is in FCTUNE_MCP_TOKEN, or the command that starts one, such as 'stdio: python server.py'; repeatable",
    )
    generate.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSONL file of rows to write")
    generate.add_argument("--num", type=int, default=2000, metavar="N", help="rows to keep; default: %(default)s")
    _add_servers(generate.add_argument_group("teacher and judge"))
    rows = generate.add_argument_group("rows")
    rows.add_argument(
        "--kinds",
        type=_to_kinds,
        metavar="KIND=SHARE,...",
        help="kinds of rows and their shares, which are scaled to add up; default: "
        + ",".join(f"{kind}={share:.0%}" for kind, share in KINDS.items()).replace("%", "%%"),
    )
    rows.add_argument(
        "--requests",
        choices=("written", "drafted"),
        default="written",
        help="written: by the teacher. drafted: by this command, from values of the schemas and those that the teacher "
        "lists; the teacher only rewords them. For weak teachers; default: %(default)s",
    )
    rows.add_argument(
        "--max-tools", type=int, default=8, metavar="N", help="most tools on offer in a row; default: %(default)s"
    )
    rows.add_argument("--seed-rows", metavar="PATH", help="rows of yours whose requests are imitated; any source")
    rows.add_argument("--seed", type=int, default=0, help="seed of plans and answers; default: %(default)s")
    rows.add_argument(
        "--held-out",
        action="append",
        default=[],
        metavar="FILE",
        help="suite, cases or rows that the model will be measured with; requests like them are dropped; repeatable",
    )
    rows.add_argument(
        "--execute",
        action="append",
        default=[],
        metavar="TOOL,...",
        help="read-only tools of MCP servers that are really called for their results; the teacher makes up all others",
    )
    add_redact_arguments(rows)
    budget = generate.add_argument_group("budget")
    budget.add_argument("--max-total-tokens", type=int, metavar="N", help="stop after N tokens of prompts and answers")
    budget.add_argument("--max-requests", type=int, metavar="N", help="stop after N requests to teacher and judge")
    budget.add_argument("--max-cost", type=float, metavar="X", help="stop at this cost; needs --price")
    budget.add_argument(
        "--price", type=_to_price, metavar="IN,OUT", help="teacher's price of a million tokens of prompts, answers"
    )
    budget.add_argument("--judge-price", type=_to_price, metavar="IN,OUT", help="the judge's; default: --price")
    generate.add_argument("--html", type=Path, metavar="FILE", help="write a page: yields by kind, and why rows fell")
    generate.add_argument("--fresh", action="store_true", help="discard what earlier runs wrote to --out")
    generate.set_defaults(run=_generate)


def _add_servers(servers: Any) -> None:
    servers.add_argument(
        "--teacher", required=True, metavar="URL", help="server that calls tools; its key is in FCTUNE_API_KEY"
    )
    servers.add_argument("--served-model", metavar="NAME", help="the teacher's name; default: the only one it serves")
    servers.add_argument(
        "--votes",
        type=int,
        default=3,
        metavar="N",
        help="answers that must agree; 0 takes the calls of --requests drafted as they are; default: %(default)s",
    )
    servers.add_argument(
        "--judge", metavar="URL", help="second model that reads each row; its key is in FCTUNE_JUDGE_API_KEY"
    )
    servers.add_argument("--judge-model", metavar="NAME", help="the judge's name; default: the only one it serves")
    servers.add_argument(
        "--format", metavar="NAME", help="call format of the teacher's text; default: the server parses the calls"
    )
    servers.add_argument(
        "--answers",
        choices=("calls", "json"),
        default="calls",
        help="how the teacher answers: calls, which its server parses, or a JSON object of calls or words, for models "
        "without tool calling; default: %(default)s",
    )
    servers.add_argument("--temperature", type=float, default=0.8, help="the teacher's; default: %(default)s")
    servers.add_argument(
        "--max-new-tokens", type=int, default=1024, metavar="N", help="limit of an answer; default: %(default)s"
    )
    servers.add_argument(
        "--concurrency", type=int, default=16, metavar="N", help="rows in progress; default: %(default)s"
    )
    servers.add_argument(
        "--timeout", type=float, default=120.0, metavar="SECONDS", help="limit of one attempt; default: %(default)s"
    )
    servers.add_argument("--attempts", type=int, default=5, help="attempts per request; default: %(default)s")


def _to_kinds(text: str) -> dict[str, float]:
    shares: dict[str, float] = {}
    for word in text.split(","):
        kind, equals, share = (part.strip() for part in word.partition("="))
        if kind not in KINDS:
            raise argparse.ArgumentTypeError(f"{kind}: unknown kind{suggest(kind, KINDS)} (known: {', '.join(KINDS)})")
        if kind in shares:
            raise argparse.ArgumentTypeError(f"{kind}: is there twice")
        try:
            shares[kind] = parse_share(share) if equals else KINDS[kind]
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{word.strip()}: {error}") from None
        if not shares[kind]:
            raise argparse.ArgumentTypeError(f"{word.strip()}: no row would be of it; leave it out")
    return shares


def _to_price(text: str) -> tuple[float, float]:
    try:
        prompt, completion = map(float, text.split(","))
    except ValueError:
        prompt = completion = math.nan
    if not (0 <= prompt < math.inf and 0 <= completion < math.inf):
        raise argparse.ArgumentTypeError(f"expected two prices, such as 0.15,0.60; got {text!r}")
    return prompt, completion


def _check_numbers(arguments: argparse.Namespace) -> None:
    if arguments.votes < (0 if arguments.requests == "drafted" else 1):
        raise ConfigError(f"--votes {arguments.votes}: expected 1 or more, or 0 with --requests drafted.")
    for name in ("num", "max_tools", "max_new_tokens", "concurrency", "attempts"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(arguments, name)}: expected 1 or more.")
    for name in ("timeout", "max_total_tokens", "max_requests", "max_cost"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')} {value:g}: expected more than 0.")
    if not 0 <= arguments.temperature <= 2:
        raise ConfigError(f"--temperature {arguments.temperature:g}: expected 0 to 2.")
    if arguments.max_cost is not None and arguments.price is None:
        raise ConfigError("--max-cost: needs --price IN,OUT, the price of a million tokens of prompts and of answers.")
    if arguments.out.suffix not in (".jsonl", ".ndjson") or arguments.out.is_dir():
        raise ConfigError(f"--out {arguments.out}: expected a file that ends in .jsonl, one row on each line.")
    if arguments.answers == "json" and arguments.format is not None:
        raise ConfigError("--format: reads calls in the teacher's text, but --answers json asks for none. Drop one.")
    parse_base_url(arguments.teacher, "--teacher")
    if arguments.judge is not None:
        parse_base_url(arguments.judge, "--judge")


def _generate(arguments: argparse.Namespace) -> int:
    _check_numbers(arguments)
    from fctune.apps.generate.drafts import MAX_SMALL_TALK
    from fctune.apps.generate.inputs import read_examples, read_held_out
    from fctune.apps.generate.plan import Planner
    from fctune.engines.mcp_tools import read_offered_tools

    offered = read_offered_tools(arguments.tools, read_environment().get("FCTUNE_MCP_TOKEN"))
    executed = _choose_executed(arguments.execute, offered)
    examples, held_out = read_examples(arguments.seed_rows), read_held_out(arguments.held_out)
    planner = Planner(
        offered.tools,
        arguments.kinds,
        arguments.seed,
        arguments.max_tools,
        examples.requests,
        hides_tools=arguments.requests == "drafted",
        max_small_talk=MAX_SMALL_TALK if arguments.requests == "drafted" else None,
    )
    if (unused := examples.describe()) is not None:
        _print_lines([f"--seed-rows {arguments.seed_rows}: {unused}"])
    _print_lines(planner.describe_left_out())
    if (sentence := planner.describe_limit(arguments.num)) is not None:
        _print_lines([sentence])
    from fctune.apps.generate.dialogue import HeldOut, Writer
    from fctune.apps.generate.teacher import Budget
    from fctune.data.redaction import Redactor

    budget = Budget(arguments.max_total_tokens, arguments.max_requests, arguments.max_cost)
    teacher = _open(arguments, budget, is_judge=False)
    judge = _open(arguments, budget, is_judge=True) if arguments.judge is not None else None
    redact = read_redact(arguments)
    writer = Writer(
        teacher,
        arguments.votes,
        judge,
        HeldOut(held_out),
        executed,
        redactor=None if redact is None else Redactor(redact),
        # In any case: what a tool really returns is no invention of the teacher's.
        result_redactor=Redactor(make_redact_config(arguments, ["secrets", *(arguments.redact or ())])),
    )
    settings = _describe(arguments, planner, writer, held_out)
    report = _run(arguments, planner, writer, budget, settings)
    _print_report(report, arguments.out)
    if arguments.html is not None:
        from fctune.apps.generate.page import write_page

        shown = {"num": arguments.num, **settings}
        write_file(arguments.html, "--html", lambda: write_page(report, shown, arguments.html))
    return 0 if report.ending in ("complete", "budget") else 1


def _choose_executed(given: list[str], offered: OfferedTools) -> dict[str, McpTool]:
    """Return the tools that are really called.

    Raises:
        ConfigError: One is unknown, not a tool of an MCP server, or not declared read-only.
    """
    known = {tool.name for tool in offered.tools}
    for name in (executed := [name.strip() for names in given for name in names.split(",")]):
        if name not in known:
            listed = ", ".join(sorted(known))
            raise ConfigError(f"--execute {name}: no such tool{suggest(name, known)}; --tools has: {listed}.")
        if name not in offered.remote:
            raise ConfigError(f"--execute {name}: not a tool of an MCP server, and only those can be called.")
        if not offered.remote[name].is_read_only:
            raise ConfigError(
                f"--execute {name}: its server does not declare it read-only (annotations.readOnlyHint), so it is "
                "never called. Leave it out, and the teacher makes up its results."
            )
    return {name: offered.remote[name] for name in executed}


def _open(arguments: argparse.Namespace, budget: Budget, is_judge: bool) -> Asker:
    from fctune.apps.generate.teacher import Asker, Price
    from fctune.calls.formats.registry import get_format
    from fctune.engines.engine import Sampling
    from fctune.engines.http_client import RetryPolicy
    from fctune.engines.server import ServerEngine

    price = (arguments.judge_price or arguments.price) if is_judge else arguments.price
    key_variable = "FCTUNE_JUDGE_API_KEY" if is_judge else "FCTUNE_API_KEY"
    engine = ServerEngine(
        arguments.judge if is_judge else arguments.teacher,
        arguments.judge_model if is_judge else arguments.served_model,
        read_environment().get(key_variable) or None,
        sampling=Sampling(0.0 if is_judge else arguments.temperature, arguments.seed),
        retry_policy=RetryPolicy(max_attempts=arguments.attempts, timeout_s=arguments.timeout),
        key_variable=key_variable,
        model_option="--judge-model" if is_judge else "--served-model",
    )
    call_format = get_format(arguments.format) if arguments.format and not is_judge else None
    return Asker(
        engine,
        budget,
        Price(*price or (0.0, 0.0)),
        arguments.max_new_tokens,
        call_format,
        answers_as_json=arguments.answers == "json",
    )


def _describe(
    arguments: argparse.Namespace, planner: Planner, writer: Any, held_out: Mapping[str, Any]
) -> dict[str, Any]:
    """Return all that the rows depend on, apart from their number."""
    from fctune.apps.generate.prompts import VERSION

    return {
        "teacher": writer.teacher.engine.model,
        "judge": writer.judge.engine.model if writer.judge is not None else None,
        "votes": arguments.votes,
        "kinds": planner.shares,
        "seed": arguments.seed,
        "temperature": arguments.temperature,
        "max_new_tokens": arguments.max_new_tokens,
        "format": arguments.format,
        "answers": arguments.answers,
        "requests": arguments.requests,
        "max_tools": arguments.max_tools,
        "num_tools": len(planner.tools),
        "tools_and_examples": planner.digest(),
        "held_out": {path: {"items": len(items), "digest": _digest(items)} for path, items in held_out.items()},
        "execute": sorted(writer.executed),
        "prompts": VERSION,
        **({} if writer.redactor is None else {"redact": asdict(writer.redactor.config)}),
    }


def _digest(items: Any) -> str:
    return hashlib.blake2b(json.dumps(items).encode(), digest_size=8).hexdigest()


def _run(
    arguments: argparse.Namespace, planner: Planner, writer: Any, budget: Budget, settings: Mapping[str, Any]
) -> Report:
    from rich.progress import Progress, TaskID
    from rich.text import Text

    from fctune.apps.generate.run import generate_rows

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    console = Terminal()
    with (
        handle_signal(signal.SIGTERM, interrupt),
        Progress(console=console, transient=True) if console.is_terminal else nullcontext() as progress,
    ):
        task = progress.add_task("rows", total=arguments.num) if progress else TaskID(0)
        return generate_rows(
            planner,
            writer,
            budget,
            arguments.num,
            arguments.out,
            concurrency=arguments.concurrency,
            drafts_requests=arguments.requests == "drafted",
            settings=settings,
            is_fresh=arguments.fresh,
            on_outcome=lambda report: progress.update(task, completed=len(report.kept)) if progress else None,
            log=lambda line: console.print(Text(f"{datetime.now():%H:%M:%S}  {line}"), soft_wrap=True),
        )


def _print_report(report: Report, out: Path) -> None:
    from fctune.apps.generate.page import ENDINGS
    from fctune.apps.generate.run import log_path
    from fctune.cli.tables import make_console, make_table

    console = make_console()
    table = make_table("rows by kind", "kind", "wanted", "asked", "kept", "dropped")
    for kind, wanted in report.wanted.items():
        verdicts = report.verdicts.get(kind, Counter[str]())
        asked, kept = verdicts.total(), verdicts["kept"]
        table.add_row(kind, *(f"{count:,}" for count in (wanted, asked, kept, asked - kept)))
    console.print(table)
    reasons = ", ".join(f"{name} {count:,}" for name, count in report.dropped.most_common())
    dropped = f"{report.dropped.total():,} dropped" + (f" ({reasons})" if reasons else "")
    lines = [f"{report.asked:,} asked for = {len(report.kept):,} kept + {dropped}"]
    usage = report.spent
    cost = f", cost {usage.cost:,.4f}" if usage.cost else ""
    tokens = f"{usage.prompt_tokens:,} + {usage.completion_tokens:,} tokens of prompts and answers"
    lines.append(f"{format_count(usage.requests, 'request')}, {tokens}{cost}")
    if cut_off := report.interrupted.requests:
        lines[-1] += f"; {format_count(cut_off, 'request')} of them for rows that were cut off"
    if report.ending != "complete":
        lines.append(f"{ENDINGS[report.ending]} {report.problem}".strip())
    if report.unlisted:
        lines.append(
            f"no values for {format_count(len(report.unlisted), 'parameter')} ({', '.join(report.unlisted)}): the "
            "teacher listed none, so rows that need one fell. Give enums, formats or codes in the schema."
        )
    lines += report.describe_secrets()
    lines.append(f"{format_count(len(report.kept), 'row')} in {out}, all outcomes in {log_path(out)}")
    if report.kept:
        lines.append(f"next: fctune tune --data {shlex.quote(str(out))} --model MODEL")
    _print_lines(lines)


def _print_lines(lines: list[str]) -> None:
    from fctune.cli.tables import make_console

    console = make_console()
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)
