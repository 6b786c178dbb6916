"""Check that a server encodes prompts as a model directory does, so that its token ids can be trained on."""

from __future__ import annotations

from itertools import zip_longest

from fctune.base.errors import ConfigError
from fctune.data.chat_template import ChatTemplate
from fctune.data.conversation import Conversation, Message, Tool
from fctune.engines.endpoint import EndpointEngine
from fctune.engines.server_answers import count_vocabulary

_SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "description": "Name of a city, as in Köln"}}}
_PROBE = Conversation(
    (Message("user", 'What is the weather in "Köln", 12.50 °C?'),),
    (Tool({"name": "get_weather", "description": "Current weather", "parameters": _SCHEMA}),),
)


def check_server_tokens(engine: EndpointEngine, template: ChatTemplate) -> None:
    """Compare the token ids of a prompt with tools; asks the server for one token.

    From then on, the engine refuses answers with ids outside the vocabulary.

    Args:
        engine: The server, opened with ``keeps_tokens``.
        template: The tokenizer and chat template that will be trained with.

    Raises:
        ConfigError: The server sends no ids, or other ones.
    """
    engine.vocab_size = count_vocabulary(template)
    (answer,) = engine.answer([_PROBE], 1)
    if answer.tokens is None:
        raise ConfigError(f"{engine.url}: sends no token ids ({answer.error}). Serve the model with vLLM.")
    own, sent = template.encode_prompt(_PROBE), answer.tokens.prompt_ids
    if tuple(own) != sent:
        position = next(i for i, (a, b) in enumerate(zip_longest(own, sent)) if a != b)
        raise ConfigError(
            f"{engine.url}: {engine.model} has a different tokenizer or chat template from {template.model_dir}: the "
            f"same prompt has {len(sent):,} token ids there and {len(own):,} here, which differ from number {position} "
            "on. Serve the model that is trained."
        )
