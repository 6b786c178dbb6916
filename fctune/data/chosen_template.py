"""A chat template that a run uses in place of its model's own."""

from __future__ import annotations

from dataclasses import dataclass

from fctune.base.errors import ConfigError
from fctune.config.chat_templates import read_chat_template
from fctune.config.sections.model import ModelConfig


@dataclass(frozen=True, slots=True)
class ChosenTemplate:
    """A chat template in place of the model's own.

    Attributes:
        name: Its name or file, as the user gave it.
        source: Its text, read once so that a file changed during a run has no effect on it.
    """

    name: str
    source: str


def read_chosen_template(model: ModelConfig) -> ChosenTemplate | None:
    """Return the template of a config's ``model`` section, or None if the model's own is used.

    Raises:
        ConfigError: The template cannot be read.
    """
    return open_chosen_template(model.chat_template, "model.chat_template=")


def open_chosen_template(name: str | None, option: str) -> ChosenTemplate | None:
    """Return the template chosen in a config or on a command line, or None if there is none.

    Args:
        name: Name or file of the template.
        option: How the user names the choice, for the error.

    Raises:
        ConfigError: The template cannot be read.
    """
    if name is None:
        return None
    try:
        return ChosenTemplate(name, read_chat_template(name))
    except ConfigError as error:
        raise ConfigError(f"{option}{error}.") from None
