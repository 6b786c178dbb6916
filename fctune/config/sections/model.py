"""The base model: its weights, tokenizer and chat template."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from fctune.base.errors import ConfigError
from fctune.config.chat_templates import read_chat_template
from fctune.config.fields import AT_LEAST_0, SAME_CONTENT, Null, SectionProblems, join_key
from fctune.config.parsing import suggest_hub_name

ModelSource = Literal["auto", "torchtune", "transformers"]


# Variables that every rendering of a chat template sets itself.
_TEMPLATE_INPUTS = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """The base model: its weights, tokenizer and chat template."""

    path: Annotated[str, SAME_CONTENT]
    """Hugging Face model directory (its `config.json` selects the architecture), or `hf:NAME[@REVISION]`, which is
    downloaded from the hub."""
    source: Annotated[ModelSource, SAME_CONTENT] = "auto"
    """Library that builds the model. `auto`: torchtune for models that it builds exactly (Llama 3, Qwen2), otherwise
    transformers; `torchtune` or `transformers` forces one."""
    chat_template: Annotated[str | None, Null("the model's own"), SAME_CONTENT] = None
    """Chat template in place of the model's own: a Jinja file, or `hermes`, `llama3` or `pythonic`, which work with any
    tokenizer that has an end-of-text token; vLLM reads the calls of `llama3` only if the tokenizer has `<|python_tag|>`
    (`add_tokens`). Used in training and evaluation, and written to the exports."""

    add_tokens: Annotated[list[str], SAME_CONTENT] = field(default_factory=list)
    """Tokens to add to the tokenizer, such as markers that it lacks. Their rows are initialised as the mean of their
    text's rows, always train, also with adapters, and are part of the exports."""
    router_aux_loss: Annotated[
        float | None, AT_LEAST_0, Null("`router_aux_loss_coef` of config.json if its `output_router_logits` is set")
    ] = None
    """Coefficient of the load-balancing loss of a mixture of experts, over all tokens of a global batch except padding;
    0: none. With several micro-batches per step, it takes a second forward pass."""
    template_args: Annotated[dict[str, Any], SAME_CONTENT] = field(default_factory=dict)
    """Switches of the chat template by name, such as `{enable_thinking: true}` or `{reasoning_effort: low}`; used for
    training, evaluation and serving. A row's own switches override them."""

    def check(self, where: str, problems: SectionProblems) -> None:
        """Check the chat template and its switches, and that a local model directory exists."""
        for problem in find_template_args_problems(self.template_args, join_key(where, "template_args")):
            problems.add(("template_args",), problem)
        if any(not token.strip() for token in self.add_tokens):
            problems.add(("add_tokens",), f"{join_key(where, 'add_tokens')}: contains an empty token; remove it")
        if repeated := sorted({token for token in self.add_tokens if self.add_tokens.count(token) > 1}):
            problems.add(
                ("add_tokens",), f"{join_key(where, 'add_tokens')}: {', '.join(map(repr, repeated))} is listed twice"
            )
        if self.chat_template is not None:
            try:
                read_chat_template(self.chat_template)
            except ConfigError as error:
                problems.add(("chat_template",), f"{join_key(where, 'chat_template')}={error}")
        key = join_key(where, "path")
        if self.path.startswith("hf:"):
            return
        if not os.path.isdir(self.path):
            problems.add(
                ("path",),
                f"{key}={self.path}: no such directory{suggest_hub_name(self.path, ';')} expected a Hugging Face model "
                "directory, or hf:NAME@REVISION",
            )
        elif not os.path.isfile(Path(self.path) / "config.json"):
            problems.add(
                ("path",), f"{key}={self.path}: contains no config.json, so it is not a Hugging Face model directory"
            )


def find_template_args_problems(template_args: dict[str, Any], where: str) -> list[str]:
    """Return a line for each switch of a chat template that cannot be one; the template itself is not read."""
    problems = []
    for name, value in template_args.items():
        if not isinstance(name, str) or not name.isidentifier():
            problems.append(f"{where}: {name!r} cannot be the name of a template's variable; use a Python identifier")
        elif name in _TEMPLATE_INPUTS:
            problems.append(f"{where}.{name}: is set from each row, not by a switch; leave it out")
        else:
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError):
                problems.append(f"{where}.{name}={value!r}: expected a value that JSON can hold")
    return problems
