"""Open the multi-turn tasks and the server that a config names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from fctune.calls.formats.registry import detect_format
from fctune.config.loading import read_environment
from fctune.config.sections.rollouts import RECORDED, DialogueConfig, ServerConfig, parse_environments
from fctune.data.chat_template import ChatTemplate
from fctune.tasks.environments.base import Split
from fctune.tasks.environments.host import EnvironmentHost
from fctune.tasks.environments.process import Limits
from fctune.tasks.environments.scoring import ENVIRONMENT_REWARD
from fctune.tasks.sampling.dialogues import DialogueLimits
from fctune.tasks.sampling.environment_tasks import EnvironmentTasks
from fctune.tasks.sampling.recorded_tasks import RECORDED_REWARD, RecordedTasks, read_recorded
from fctune.tasks.sampling.server_engine import ServerPatience, ServerRolloutEngine


def open_dialogue_tasks(
    cases: str,
    config: DialogueConfig,
    template: ChatTemplate,
    *,
    max_new_tokens: int,
    max_tokens: int,
    reward: Mapping[str, float] | None = None,
    where: str = "grpo.reward",
    split: Split = "train",
) -> EnvironmentTasks | RecordedTasks:
    """Open the tasks of ``environment:NAMES:TASKS`` or ``recorded:ROWS``.

    Args:
        cases: Value of ``grpo.cases``.
        config: Limits of dialogues and environments.
        template: Chat template and tokenizer of the policy.
        max_new_tokens: Limit of one answer.
        max_tokens: Limit of a dialogue, prompt included.
        reward: Weights of the parts; None: the default for the kind of tasks.
        where: Config key of the weights, for messages.
        split: Side of environments' tasks.

    Raises:
        ConfigError: An environment or a part of the reward does not exist, or an environment is unusable.
        DataError: The rows cannot be read, or none has recorded results.
    """
    call_format = detect_format(template.source)
    limits = DialogueLimits(config.max_turns, max_new_tokens, max_tokens)
    if cases.startswith(RECORDED):
        weights = RECORDED_REWARD if reward is None else reward
        rows = read_recorded(cases.removeprefix(RECORDED))
        return RecordedTasks(rows, template, call_format, limits, weights, where)
    parsed = parse_environments(cases)
    assert parsed is not None, "the config was checked"
    names, num_tasks = parsed
    allowed = Limits(config.call_timeout_s, int(config.memory_gib * 1024**3), config.max_result_bytes)
    hosts: list[EnvironmentHost] = []
    try:
        for name in names:
            hosts.append(EnvironmentHost(name, allowed))
        weights = ENVIRONMENT_REWARD if reward is None else reward
        return EnvironmentTasks(hosts, split, num_tasks, template, call_format, limits, weights, where)
    except BaseException:
        for host in hosts:
            host.close()
        raise


def open_server_engine(
    config: ServerConfig,
    template: ChatTemplate,
    output_dir: Path,
    *,
    temperature: float = 1.0,
    min_positions: int = 0,
    is_resumed: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> ServerRolloutEngine:
    """Connect to the server that a config names.

    Args:
        config: The server.
        template: Chat template and tokenizer of the policy.
        output_dir: Directory of the run, which names its adapters on the server.
        temperature: Temperature of the answers.
        min_positions: Smallest context of the server, in tokens.
        is_resumed: Wait for the server if it is not there yet.
        say: Called with a line when the server is lost or back.

    Raises:
        ConfigError: No server answers, or it does not serve this model.
    """
    publish_dir = Path(config.publish_dir) if config.publish_dir is not None else output_dir / "policies"
    return ServerRolloutEngine(
        config.url,
        publish_dir,
        template,
        temperature=temperature,
        served_model=config.served_model,
        run_id=str(output_dir.absolute()),
        api_key=read_environment().get("FCTUNE_API_KEY") or None,
        concurrency=config.concurrency,
        min_positions=min_positions,
        patience=ServerPatience(max_wait_s=config.max_wait_s),
        is_resumed=is_resumed,
        say=say,
    )
