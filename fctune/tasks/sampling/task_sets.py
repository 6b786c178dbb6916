"""Open the tasks and the server that a config names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from fctune.base.errors import ConfigError
from fctune.config.loading import read_environment
from fctune.config.sections.rollouts import (
    AGENT,
    MCP,
    RECORDED,
    VERIFIERS,
    DialogueConfig,
    ServerConfig,
    parse_environments,
)
from fctune.data.chat_template import ChatTemplate
from fctune.engines.policy_server import PolicyServer, PolicyServers, ServerPatience
from fctune.tasks.environments.agent.task_file import read_agent_file
from fctune.tasks.environments.agent.tasks import AgentTasks
from fctune.tasks.environments.base import Split
from fctune.tasks.environments.host import EnvironmentHost, Limits
from fctune.tasks.environments.mcp.recording import Recording
from fctune.tasks.environments.mcp.server import EpisodeServerLimits, ReplayedServer, ToolServer
from fctune.tasks.environments.mcp.task_file import read_task_file
from fctune.tasks.environments.mcp.tasks import McpTasks
from fctune.tasks.environments.tasks import EnvironmentTasks
from fctune.tasks.environments.verifiers.tasks import VerifiersHost, VerifiersTasks, read_verifiers_file
from fctune.tasks.evaluation.row_cases import make_row_cases
from fctune.tasks.recorded import RecordedTasks, read_recorded
from fctune.tasks.rollouts import RolloutSettings
from fctune.tasks.suite import Suite
from fctune.tasks.suite_files import benchmark_of, load_suite, make_cases


def open_dialogue_tasks(
    cases: str,
    config: DialogueConfig,
    settings: RolloutSettings,
    split: Split = "train",
    record: Path | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> AgentTasks | EnvironmentTasks | McpTasks | RecordedTasks | VerifiersTasks:
    """Open the tasks of ``environment:NAMES:TASKS``, ``mcp:FILE``, ``verifiers:FILE``, ``recorded:ROWS`` or
    ``agent:FILE``.

    Args:
        cases: Value of ``cases`` in the section of the rollouts.
        config: Limits of dialogues and environments.
        settings: How tasks are asked and rewarded; ``config`` limits their turns.
        split: Side of the tasks, except of recorded rows and agents.
        record: File to which an MCP server's results, or the answers to an agent, are appended; None: they are not
            recorded.
        log: Called with a line about a server whose state is not reset, or an agent that fails.

    Raises:
        ConfigError: An environment, a server or a part of the reward does not exist or is unusable.
        DataError: The rows, the tasks or the recording cannot be read, or none has recorded results.
    """
    if cases.startswith(AGENT):
        path = Path(cases.removeprefix(AGENT))
        return AgentTasks(path.stem, *read_agent_file(path), settings, record, log)
    settings = replace(settings, limits=replace(settings.limits, max_turns=config.max_turns))
    if cases.startswith(RECORDED):
        return RecordedTasks(read_recorded(cases.removeprefix(RECORDED)), settings)
    if cases.startswith(MCP):
        return _open_mcp_tasks(Path(cases.removeprefix(MCP)), config, settings, split, record, log)
    if cases.startswith(VERIFIERS):
        path = Path(cases.removeprefix(VERIFIERS))
        file = read_verifiers_file(path)
        process = VerifiersHost(path, file, config)
        try:
            return VerifiersTasks(file, process, split, settings)
        except BaseException:
            process.close()
            raise
    parsed = parse_environments(cases)
    assert parsed is not None, "the config was checked"
    names, num_tasks = parsed
    allowed = Limits(config.call_timeout_s, int(config.memory_gib * 1024**3), config.max_result_bytes)
    hosts: list[EnvironmentHost] = []
    try:
        for name in names:
            hosts.append(EnvironmentHost(name, allowed))
        return EnvironmentTasks(hosts, split, num_tasks, settings)
    except BaseException:
        for host in hosts:
            host.close()
        raise


def _open_mcp_tasks(
    path: Path,
    config: DialogueConfig,
    settings: RolloutSettings,
    split: Split,
    record: Path | None,
    log: Callable[[str], None],
) -> McpTasks:
    file = read_task_file(path)
    server: ToolServer | ReplayedServer
    if config.replay is not None:
        server, record = ReplayedServer(Recording(Path(config.replay))), None
    else:
        server = ToolServer(
            file, EpisodeServerLimits(config.call_timeout_s, config.episode_timeout_s, config.max_result_bytes)
        )
        if not file.is_process and file.reset is None:
            log(
                f"{server.name}: each dialogue has a session of its own, but what calls change on the server may carry "
                f"over to others. If a tool restores its state, name it as reset in {path}."
            )
    try:
        return McpTasks(path.stem, file, server, split, settings, record)
    except BaseException:
        server.close()
        raise


def open_server_engine(
    config: ServerConfig,
    template: ChatTemplate,
    output_dir: Path,
    *,
    temperature: float = 1.0,
    min_positions: int = 0,
    is_resumed: bool = False,
    log: Callable[[str], None] = lambda line: None,
    section: str = "grpo",
) -> PolicyServer | PolicyServers:
    """Connect to the servers that a config names.

    Args:
        config: The servers.
        template: Chat template and tokenizer of the policy.
        output_dir: Directory of the run, which names its adapters on the server.
        temperature: Temperature of the answers.
        min_positions: Smallest context of the server, in tokens.
        is_resumed: Wait for the server if it is not there yet.
        log: Called with a line when the server is lost or back.
        section: Config section of the server, for messages.

    Raises:
        ConfigError: No server answers, or it does not serve this model.
    """
    publish_dir = Path(config.publish_dir) if config.publish_dir is not None else output_dir / "policies"
    run_id = str(output_dir.absolute())
    servers = [
        PolicyServer(
            url,
            publish_dir,
            template,
            temperature=temperature,
            served_model=config.served_model,
            run_id=run_id if len(config.urls) == 1 else f"{run_id} {url}",
            api_key=read_environment().get("FCTUNE_API_KEY") or None,
            concurrency=config.concurrency,
            min_positions=min_positions,
            patience=ServerPatience(max_wait_s=config.max_wait_s),
            is_resumed=is_resumed,
            log=log,
            url_option=f"{section}.server.url",
            model_option=f"{section}.server.served_model",
            can_sleep=config.sleeps_while_training,
        )
        for url in config.urls
    ]
    return servers[0] if len(servers) == 1 else PolicyServers(servers)


def load_training_suite(path: str, is_forced: bool = False, section: str = "grpo") -> Suite:
    """Load training cases: those of a suite's file, or the last turns of synthetic rows.

    Args:
        path: JSONL file of cases, suite in YAML, or ``synthetic:SPLIT:ROWS[:SEED]``.
        is_forced: Accept the cases of a benchmark.
        section: Config section that names them, for messages.

    Raises:
        ConfigError: The cases belong to a benchmark, and ``is_forced`` is False.
        DataError: The cases cannot be read, or have no expected answers.
    """
    if path.startswith("synthetic:"):
        rows = [case.row for case in make_row_cases([path]).cases]
        named = ((f"{path}: case {number}", number, row) for number, row in enumerate(rows, start=1))
        suite = Suite("synthetic", tuple(make_cases(Path(path), named)))
    else:
        suite = load_suite(path)
    if (benchmark := benchmark_of(suite)) is not None and not is_forced:
        raise ConfigError(
            f"{section}.cases={path}: belongs to a benchmark ({benchmark}), which cannot measure a model that has "
            f"learned from it. Use other cases, or set {section}.force_benchmark=true; every output of the run then "
            "says so."
        )
    return suite
