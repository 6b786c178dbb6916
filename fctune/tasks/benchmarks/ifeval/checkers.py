"""The checkers of IFEval's instructions, from the package lm-eval.

Importing ``lm_eval.tasks`` loads the whole harness, with torch and packages that the checkers do not need, and the
checkers' module downloads NLTK's data. Neither happens here: a checker whose data is not installed is absent.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from fctune.base.errors import ConfigError

_MISSING = (
    "ifeval: its checkers are not installed. pip install 'fctune[ifeval]', or pip install --no-deps lm-eval==0.4.13 "
    "and pip install nltk langdetect immutabledict."
)
_PROBE = "One sentence. ANOTHER one, with a comma."


@functools.cache
def load_checkers() -> Any:
    """Return the module ``lm_eval.tasks.ifeval.utils``.

    Raises:
        ConfigError: lm-eval, or a package that its checkers need, is not installed.
    """
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(_MISSING)
    folder = Path(spec.submodule_search_locations[0]) / "tasks"
    try:
        # The module would look for NLTK's data, and download them.
        with _empty_package("lm_eval.tasks", folder), mock.patch("nltk.data.find"):
            checkers = importlib.import_module("lm_eval.tasks.ifeval.utils")
    except ImportError as error:
        raise ConfigError(f"{_MISSING} ({error})") from None
    # The language of a short text is guessed with random numbers.
    importlib.import_module("langdetect").DetectorFactory.seed = 0
    return checkers


def find_absent(name: str, arguments: Mapping[str, Any]) -> str | None:
    """Return why an instruction cannot be checked on this machine; None if it can.

    Raises:
        ValueError: There is no such instruction, or its arguments are not those that it takes.
    """
    known = load_checkers().instructions_registry.INSTRUCTION_DICT
    if name not in known:
        raise ValueError(f"instruction_id_list: {name!r} is not an instruction that lm-eval checks")
    try:
        checker = known[name](name)
        checker.build_description(**arguments)
        if "prompt" in (checker.get_instruction_args() or ()):
            checker.build_description(prompt=_PROBE)
    except Exception as error:  # they check their arguments with errors of all kinds
        raise ValueError(f"kwargs: {name} does not take {dict(arguments)} ({error})") from None
    try:
        checker.check_following(_PROBE)
    except Exception as error:  # other answers may be checked all the same
        # A KeyError, of an answer, is a LookupError too.
        return "needs NLTK's data: python -m nltk.downloader punkt_tab" if type(error) is LookupError else None
    return None


def check(
    prompt: str, names: Sequence[str], arguments: Sequence[Mapping[str, Any]], answer: str
) -> tuple[list[bool], list[bool]]:
    """Return for each instruction if the answer follows it, strictly and loosely.

    The loose reading also tries the answer without its first and last line and without asterisks.
    """
    checkers = load_checkers()
    asked = checkers.InputExample(0, list(names), prompt, [dict(one) for one in arguments])
    strict = checkers.test_instruction_following_strict(asked, answer)
    loose = checkers.test_instruction_following_loose(asked, answer)
    return list(map(bool, strict.follow_instruction_list)), list(map(bool, loose.follow_instruction_list))


@contextmanager
def _empty_package(name: str, folder: Path) -> Iterator[None]:
    """Let modules of a package be imported without running its ``__init__``."""
    if name in sys.modules:
        yield
        return
    package = types.ModuleType(name)
    package.__path__ = [str(folder)]
    sys.modules[name] = package
    try:
        yield
    finally:
        del sys.modules[name]
