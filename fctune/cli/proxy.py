"""``fctune proxy``: let agents ask a model through OpenAI's chat API, and record every token."""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fctune.base.errors import ConfigError
from fctune.cli.parser import add_template_args_argument
from fctune.config.loading import read_environment
from fctune.config.shipped import resolve_shipped_path
from fctune.engines.model_files import ModelFiles, check_model_paths

if TYPE_CHECKING:
    from fctune.data.chat_template import ChatTemplate
    from fctune.engines.local import LocalEngine
    from fctune.engines.policy_server import PolicyServer


def add_commands(commands: Any) -> None:
    """Add ``fctune proxy`` to the command-line parser."""
    proxy = commands.add_parser(
        "proxy",
        help="let agents ask a model through OpenAI's API, and record every token",
        description="Serve OpenAI's chat API in front of a model, and record the token ids and log-probabilities of "
        "every answer. An agent needs nothing but the base URL http://HOST:PORT/episode/ID/v1, which names its "
        "episode. For training, grpo.cases=agent:FILE starts such a proxy by itself.",
    )
    proxy.add_argument(
        "model",
        type=resolve_shipped_path,
        metavar="MODEL",
        help="directory, run, adapter or hf:NAME; its chat template",
    )
    proxy.add_argument("--adapter", metavar="DIR", help="PEFT adapter directory to load on top of the model")
    proxy.add_argument("--server", metavar="URL", help="vLLM server of the model; default: the model in this process")
    proxy.add_argument("--served-model", metavar="NAME", help="its name on the server; default: the only one")
    proxy.add_argument("--out", type=Path, default=Path("answers.jsonl"), metavar="FILE", help="default: %(default)s")
    proxy.add_argument("--host", default="127.0.0.1", help="address to listen on; default: %(default)s")
    proxy.add_argument("--port", type=int, default=8100, help="default: %(default)s; 0: a free one")
    proxy.add_argument("--name", default="policy", help="name of the model that agents ask for; default: %(default)s")
    proxy.add_argument("--temperature", type=float, default=1.0, help="of every answer; default: %(default)s")
    proxy.add_argument("--seed", type=int, default=0, help="seed of sampling; default: %(default)s")
    for option, default, meaning in (
        ("--max-new-tokens", 1024, "tokens of an answer"),
        ("--context", 4096, "tokens of a prompt and its answer"),
        ("--concurrency", 64, "requests that are answered at a time; others wait"),
    ):
        proxy.add_argument(option, type=int, default=default, metavar="N", help=f"{meaning}; default: %(default)s")
    for option, meaning in (("--max-answers", "answers"), ("--max-generated", "generated tokens")):
        proxy.add_argument(option, type=int, metavar="N", help=f"{meaning} of an episode; default: any number")
    add_template_args_argument(proxy)
    proxy.set_defaults(run=_proxy)


def _proxy(arguments: argparse.Namespace) -> int:
    check_model_paths(arguments.model, arguments.adapter)
    for name in ("max_new_tokens", "context", "concurrency", "max_answers", "max_generated"):
        if (given := getattr(arguments, name)) is not None and given < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {given}: expected 1 or more.")
    if not 0 < arguments.temperature < math.inf:
        raise ConfigError(f"--temperature {arguments.temperature:g}: expected more than 0, as tokens are sampled.")
    if not 0 <= arguments.port <= 65535:
        raise ConfigError(f"--port {arguments.port}: expected 0 to 65535.")
    if arguments.out.is_dir():
        raise ConfigError(f"--out {arguments.out}: is a directory. Name a file in it.")
    from fctune.calls.response_template import find_call_format
    from fctune.engines.opening import find_files
    from fctune.tasks.environments.agent.proxy import AgentProxy
    from fctune.tasks.environments.agent.sessions import AnswerLog, SessionLimits

    files = find_files(arguments.model, arguments.adapter)
    if files is None:
        raise ConfigError(f"{arguments.model}: pass the model's directory, and its server as --server.")
    with tempfile.TemporaryDirectory(prefix="fctune-proxy-") as scratch:
        engine, template = _open(arguments, files, Path(scratch))
        proxy = AgentProxy(
            engine,
            template,
            find_call_format(template),
            SessionLimits(arguments.max_new_tokens, arguments.context, arguments.max_answers, arguments.max_generated),
            name=arguments.name,
            log=AnswerLog(arguments.out),
            host=arguments.host,
            port=arguments.port,
            concurrency=arguments.concurrency,
            seed=arguments.seed,
            is_open=True,
        )
        print(
            f"ready: {proxy.base_url('ID')}   (model {proxy.model}; records {arguments.out}; Ctrl-C ends it)",
            flush=True,
        )
        try:
            while proxy.failure is None:
                proxy.answer_waiting(0.5)
            raise proxy.failure
        finally:
            proxy.close()
            engine.close()


def _open(
    arguments: argparse.Namespace, files: ModelFiles, scratch: Path
) -> tuple[LocalEngine | PolicyServer, ChatTemplate]:
    """Return what answers, and the chat template that prompts are encoded with."""
    from fctune.data.chat_template import ChatTemplate
    from fctune.engines.engine import Sampling
    from fctune.engines.local import LocalEngine
    from fctune.engines.policy_server import PolicyServer

    if arguments.server is None:
        engine = LocalEngine(
            *files,
            batch_size=arguments.concurrency,
            sampling=Sampling(arguments.temperature, arguments.seed),
            template_args=arguments.template_args,
            keeps_tokens=True,
        )
        return engine, engine.template
    if arguments.adapter is not None:
        raise ConfigError("--adapter: the server has it; name it with --served-model.")
    template = ChatTemplate(files.tokenizer_dir, template_args=arguments.template_args)
    server = PolicyServer(
        arguments.server,
        scratch,
        template,
        temperature=arguments.temperature,
        served_model=arguments.served_model,
        run_id=str(scratch),
        api_key=read_environment().get("FCTUNE_API_KEY") or None,
        concurrency=arguments.concurrency,
        min_positions=arguments.context,
        log=lambda line: print(line, flush=True),
        url_option="--server",
        model_option="--served-model",
    )
    return server, template
