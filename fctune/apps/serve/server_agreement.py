"""Check a user's own options of vLLM's server against those that fctune sets."""

from __future__ import annotations

import argparse
import ipaddress
from collections.abc import Sequence

from fctune.base.errors import ConfigError, ConfigProblems


def require_agreement(options: Sequence[str], further: Sequence[str]) -> None:
    """Check that a user's options of vLLM's server do not undo those that the model and ``fctune serve`` need.

    Args:
        options: Options from ``serving.server_options``. If they name no parser, the user may name any,
            and a chat template.
        further: Further options, given by the user.

    Raises:
        ConfigError: They set what ``fctune serve`` sets, name the wrong parser for the model's format or a limit below
            the adapter's rank, or make a server that cannot be asked over HTTP.
    """
    needed, named = _read_options(options), _read_options(further)
    problems = ConfigProblems()
    for flag, remedy in _OWN.items():
        if _is_given(named, flag):
            problems.add(f"--vllm: {flag} is set by fctune serve. {remedy}")
    for flag in _UNREACHABLE:
        if _is_given(named, flag):
            problems.add(f"--vllm: {flag} makes a server that fctune serve cannot reach over HTTP. Leave it out.")
    if named.lora_modules is not None and needed.lora_modules is not None:
        problems.add("--vllm: --lora-modules replaces the adapter of PATH. Leave it out, or serve the base itself.")
    if needed.tool_call_parser is not None:
        _check_chat_options(needed, named, problems)
    limit, rank = named.max_lora_rank, needed.max_lora_rank
    if limit is not None and rank is not None and limit < rank:
        problems.add(
            f"--vllm: --max-lora-rank {limit} is too low for the adapter, which needs {rank}. Leave it out; fctune "
            "serve sets it."
        )
    problems.raise_all()


def find_host(further: Sequence[str]) -> str:
    """Return the host part of the URL at which this machine reaches a server with the user's options."""
    host: str = _read_options(further).host or "0.0.0.0"
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # a name
        return host
    if address.is_unspecified:
        return "127.0.0.1" if address.version == 4 else "[::1]"
    return host if address.version == 4 else f"[{host}]"


def _check_chat_options(needed: argparse.Namespace, named: argparse.Namespace, problems: ConfigProblems) -> None:
    for flag in ("--tool-call-parser", "--reasoning-parser"):
        given, own = getattr(named, _to_name(flag)), getattr(needed, _to_name(flag))
        if given is not None and given != own:
            problems.add(
                f"--vllm: {flag} {given} cannot read what this model writes, which needs {own or 'none'}. Leave it "
                "out; fctune serve names the right one."
            )
    if named.chat_template is not None:
        problems.add(
            "--vllm: --chat-template replaces the template for which fctune serve chose the parsers. Write it to "
            "chat_template.jinja in the model's directory instead."
        )


def _is_given(named: argparse.Namespace, flag: str) -> bool:
    return getattr(named, _to_name(flag)) not in (None, False)


def _to_name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _read_options(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--max-lora-rank", type=int)
    parser.add_argument("--lora-modules", nargs="+")
    for flag in _SWITCHES:
        parser.add_argument(flag, action="store_true")
    for flag in {*_OWN, *_UNREACHABLE, *_CHECKED} - {*_SWITCHES}:
        parser.add_argument(flag)
    try:
        # vLLM takes underscores, too.
        return parser.parse_known_args([_with_dashes(word) for word in words])[0]
    except argparse.ArgumentError as error:
        raise ConfigError(f"--vllm: {error}.") from None


def _with_dashes(word: str) -> str:
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") else word


# Options of vLLM that fctune sets from its own, which are named here.
_OWN = {
    "--model": "Name the model as its PATH.",
    "--tokenizer": "It takes the tokenizer from the model's or the adapter's directory.",
    "--served-model-name": "Use its own --name.",
    "--port": "Use its own --port.",
    "--default-chat-template-kwargs": "Use its own --template-args.",
}
# Options with which vLLM answers somewhere else than at http://HOST:PORT, or not at all.
_UNREACHABLE = ("--uds", "--ssl-keyfile", "--ssl-certfile", "--grpc", "--headless")
_CHECKED = ("--host", "--tool-call-parser", "--reasoning-parser", "--chat-template")
_SWITCHES = ("--grpc", "--headless")
