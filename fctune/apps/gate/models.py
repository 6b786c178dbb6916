"""The two models of a gate: opened one after the other, so that memory holds one, and asked the same cases."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fctune.base.errors import ConfigError
from fctune.base.network import is_loopback
from fctune.base.terminal import Heartbeat
from fctune.calls.formats.base import CallFormat
from fctune.config.intervals import format_count
from fctune.config.sections.gate import GateConfig
from fctune.config.server_address import parse_base_url
from fctune.data.chat_template import MissingTemplateError, load_tokenizer
from fctune.data.chosen_template import ChosenTemplate
from fctune.data.template_args import read_template_args
from fctune.engines.engine import Engine, Prompt, Sampling
from fctune.engines.model_files import ModelFiles
from fctune.engines.opening import find_files, open_engine
from fctune.engines.server import ServerEngine
from fctune.tasks.evaluation.results import ResultsFile
from fctune.tasks.judge import Row
from fctune.tasks.suite import Suite
from fctune.tasks.task import Case

_CONCURRENCY = 16


class ServerGoneError(ConfigError):
    """A server stopped answering in the middle of a gate; ``outage`` is what it said last."""

    def __init__(self, message: str, outage: str):
        super().__init__(message)
        self.outage = outage


@dataclass
class GateModel:
    """One of the two models.

    Attributes:
        side: ``base`` or ``tuned``; names its files.
        model: As the user named it: a directory, a run, an adapter, ``hf:NAME``, or a server's address.
        files: Its files; None for a server.
        served_model: Name to request from a server; None: the only one.
        template: Template in place of its own.
        template_args: Switches of the template, over those recorded with it.
        request: Fields that are merged into each request to a server.
        is_streamed: A server streams its answers.
        num_kept: Number of answers of an earlier gate, of a server that does not tell which weights gave them.
    """

    side: str
    model: str
    files: ModelFiles | None
    served_model: str | None = None
    template: ChosenTemplate | None = None
    template_args: dict[str, Any] | None = None
    request: Mapping[str, Any] = field(default_factory=dict)
    is_streamed: bool = False
    num_kept: int = field(default=0, init=False)
    _opened: tuple[Engine, CallFormat | None] | None = field(default=None, init=False)

    @property
    def has_server(self) -> bool:
        """True if a server answers."""
        return self.files is None

    def open(self, config: GateConfig) -> tuple[Engine, CallFormat | None]:
        """Return the engine with the call format of its text, None if the server parses it; opened once."""
        if self._opened is None:
            self._opened = open_engine(
                self.model,
                self.files,
                sampling=Sampling(config.temperature, config.seed),
                template_args=self.template_args,
                chat_template=self.template,
                batch_size=config.batch_size,
                served_model=self.served_model,
                concurrency=_CONCURRENCY,
                request=self.request,
                is_streamed=self.is_streamed,
            )
        return self._opened

    def close(self) -> None:
        """Release the model's memory."""
        if self._opened is not None and hasattr(engine := self._opened[0], "close"):
            engine.close()
        self._opened = None

    def ask(
        self, suite: Suite, config: GateConfig, folder: Path, is_fresh: bool, log: Callable[[str], None]
    ) -> dict[str, Row]:
        """Ask the cases that have no answer in ``folder`` yet, and return the rows of all by id.

        Raises:
            ConfigError: The folder holds answers with other settings, or the server refuses every request.
            DataError: No case can be asked.
            ServerGoneError: The server failed as a whole, so that missing answers say nothing about the model.
        """
        from fctune.tasks.evaluation.run import describe_run, run_suite  # imports torch

        engine, own_format = self.open(config)
        call_format = suite.call_format or own_format
        max_new_tokens = max(config.max_new_tokens, suite.max_new_tokens or 0)
        results = ResultsFile(folder / f"{self.side}.{suite.name}.jsonl")
        tells_weights = not self.has_server or "served_digest" in engine.describe()
        if config.base_answers is not None and self.side == "base" and tells_weights and not is_fresh:
            earlier = Path(config.base_answers) / results.path.name
            if reasons := results.take_over(earlier, describe_run(suite, engine, call_format, max_new_tokens)):
                log(f"{self.side}: {suite.name}, no answers taken over from {earlier} ({'; '.join(reasons)})")
        kept = 0 if is_fresh else results.count()
        if not tells_weights:
            self.num_kept += kept
        before = f", {kept:,} of them answered before" if kept else ""
        log(f"{self.side}: {suite.name}, {format_count(len(suite.all_cases), 'case')}{before}")
        num_answered = kept

        def count(row: Row, num_done: int, num_cases: int) -> None:
            nonlocal num_answered
            num_answered = kept + num_done

        def describe() -> str:
            num_cases = format_count(len(suite.all_cases), "case")
            return f"{self.side}: {suite.name}, {num_answered:,} of {num_cases} answered"

        with Heartbeat(log, describe):
            rows = run_suite(
                suite,
                engine,
                call_format,
                results,
                max_new_tokens=max_new_tokens,
                num_at_once=4 * _CONCURRENCY if self.has_server else config.batch_size,
                is_fresh=is_fresh,
                on_row=count,
            )
        assert rows is not None
        num_failed = sum(row.get("error") is not None for row in rows)
        if num_failed and isinstance(engine, ServerEngine) and (outage := engine.find_outage()):
            raise ServerGoneError(
                f"{self.model}: the server of the {'base' if self.side == 'base' else 'result'} is gone: {outage}. "
                f"{num_failed:,} of {format_count(len(rows), 'case')} of {suite.name} have no answer, so nothing is "
                "judged. Start it again; the same command asks what is missing.",
                outage,
            )
        return {row["id"]: row for row in rows}

    def can_answer(self, case: Case, config: GateConfig) -> bool:
        """Return True if the model answers a case now."""
        (answer,) = self.open(config)[0].answer([Prompt(case.prompt, config.max_new_tokens)])
        return answer.error is None


def open_models(
    base: str, tuned: str, config: GateConfig, base_name: str | None = None, tuned_name: str | None = None
) -> tuple[GateModel, GateModel]:
    """Find both models, and settle the template that the base is asked with; loads no weights.

    Args:
        base: The base, as the user named it.
        tuned: The result.
        config: Settings of the gate.
        base_name: Name under which a server serves the base.
        tuned_name: Name under which a server serves the result.

    Raises:
        ConfigError: A model is missing, both are the same, or their chat templates differ, which ``chat_template``
            does not allow.
    """
    if (base, base_name) == (tuned, tuned_name):
        raise ConfigError(f"--base and --tuned are both {base}: a gate compares the result with its base. Name two.")
    before = GateModel("base", base, find_files(base), base_name)
    after = GateModel("tuned", tuned, find_files(tuned), tuned_name)
    if before.files is not None and after.files is not None and _resolve(before.files) == _resolve(after.files):
        folder = after.files.adapter_dir or after.files.model_dir
        raise ConfigError(
            f"--base {base} and --tuned {tuned} are both the model in {folder}: a gate compares the result with its "
            "base. Name two."
        )
    if before.files is None and after.files is None and _is_same_served(before, after, config):
        raise ConfigError(
            f"--base {base} and --tuned {tuned} are both the model {after.open(config)[0].describe()['served_model']} "
            "of one server: a gate compares the result with its base. Name two, with --base-name and --tuned-name if "
            "one server serves both."
        )
    if before.files is None or after.files is None or config.chat_template == "own":
        return before, after
    (own, own_args), (other, other_args) = _read_template(before.files), _read_template(after.files)
    if own == other and own_args == other_args:
        return before, after
    if config.chat_template == "same":
        what = "chat templates" if own != other else "recorded switches of the chat template"
        raise ConfigError(
            f"--base {base} and --tuned {tuned} have different {what} ({_name(own, own_args)} and "
            f"{_name(other, other_args)}), so their answers differ for two reasons. Pass --chat-template tuned to ask "
            "the base with the result's, or own to ask each with its own."
        )
    if other is None:
        raise ConfigError(f"--tuned {tuned}: has no chat template. Export it again.")
    before.template = ChosenTemplate(f"{tuned}'s", other)
    before.template_args = other_args
    return before, after


def _is_same_served(before: GateModel, after: GateModel, config: GateConfig) -> bool:
    """Return True if two servers are one, under any spelling of its address, and serve both sides the same model."""
    first, second = (_spell_alike(parse_base_url(model.model, f"--{model.side}")) for model in (before, after))
    if first != second:
        return False
    if before.served_model == after.served_model:
        return True
    names = [model.open(config)[0].describe()["served_model"] for model in (before, after)]
    return bool(names[0] == names[1])


def _spell_alike(url: str) -> tuple[str, str, int, str]:
    """Return the scheme, host, port and path of a server's address; all names of this machine alone are one host."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return parts.scheme, "localhost" if is_loopback(host) else host, port, parts.path


def _resolve(files: ModelFiles) -> list[Path]:
    return [path.resolve() for path in files if path is not None]


def _read_template(files: ModelFiles) -> tuple[str | None, dict[str, Any]]:
    try:
        source = load_tokenizer(files.tokenizer_dir).get_chat_template(None, [{}])
    except MissingTemplateError:
        source = None
    return source, read_template_args(files.tokenizer_dir)


def _name(source: str | None, switches: Mapping[str, Any]) -> str:
    """Return a short name of a template, by which a person sees that two differ."""
    if source is None:
        return "none"
    digest = hashlib.blake2b(source.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
    return f"{digest} with {switches}" if switches else digest
