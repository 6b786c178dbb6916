"""Several real vLLM servers of one run: every version in each, each dialogue on one, and one of them lost."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.policy_server import Server, Training
from fctune.base.errors import ConfigError
from fctune.config.sections.rollouts import ServerConfig
from fctune.data.chat_template import ChatTemplate
from fctune.tasks.sampling.task_sets import open_server_engine
from tests.conftest import TINY_BASE
from tests.ranks import find_port
from tests.serving.servers import relay
from tests.tasks.environments.agent_files import check_recorded_tokens, read_lines, write_agent_file

pytestmark = [pytest.mark.serving, pytest.mark.timeout(1800)]

RANK, STEPS = 8, 6


@pytest.fixture(scope="module")
def servers(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    logs = tmp_path_factory.mktemp("servers")
    made = [
        Server(TINY_BASE, vllm_python, find_port(), RANK, logs / f"{number}.log", "--max-num-seqs 16")
        for number in range(2)
    ]
    with ExitStack() as stack:
        for server in made:
            stack.callback(server.stop)
        threads = [threading.Thread(target=server.start) for server in made]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [len(server.ready_s) for server in made] == [1, 1]
        yield made


def address_of(server: Server) -> str:
    return f"http://127.0.0.1:{server.port}"


def find_versions(passed: list[tuple[str, Any]]) -> tuple[set[str], set[int]]:
    """Return the starts of the names, and the versions, of the adapters that were loaded."""
    names = [body["lora_name"] for path, body in passed if path == "/v1/load_lora_adapter"]
    parts = [re.fullmatch(r"(.*)-v(\d+)-\w+", name) for name in names]
    return {part[1] for part in parts if part}, {int(part[2]) for part in parts if part}


def test_a_run_divides_its_dialogues_among_servers_and_waits_for_the_one_that_is_lost(
    servers: list[Server], tmp_path: Path
) -> None:
    tasks = [{"question": f"What is {number} and {number}?", "turns": 4} for number in range(12)]
    file, run_dir, log = write_agent_file(tmp_path, tasks), tmp_path / "run", tmp_path / "train.log"
    with ExitStack() as stack:
        relays = [stack.enter_context(relay(address_of(server))) for server in servers]
        urls, sent = [url for url, _ in relays], [passed for _, passed in relays]
        command = [sys.executable, "-m", "fctune.cli", "train", "tiny_grpo", f"output_dir={run_dir}"]
        command += [f"model.path={TINY_BASE}", f"grpo.cases=agent:{file}", f"adapter.rank={RANK}", "epochs=100"]
        command += ["grpo.engine=server", f"grpo.server.url={','.join(urls)}", f"max_steps={STEPS}"]
        command += ["grpo.prompts_per_step=4", "grpo.group_size=2", "grpo.max_new_tokens=24", "grpo.mask_cut=false"]
        command += ["data.seq_len=1024", "optimizer.lr=1e-3"]
        training = Training(command, log)
        stack.callback(training.kill)
        training.wait_for(run_dir, 2)
        servers[1].kill()
        while "is unavailable" not in log.read_text():
            assert training.process.poll() is None, log.read_text()[-4000:]
            time.sleep(0.1)
        servers[1].start()
        assert training.process.wait(600) == 0, log.read_text()[-4000:]
    said = [line for line in log.read_text().splitlines() if "the server at" in line]
    assert len(said) == 2
    assert f"the server at {urls[1]} is unavailable" in said[0]
    assert f"the server at {urls[1]} is back after" in said[1]
    metrics, rows = read_lines(run_dir / "metrics.jsonl"), read_lines(run_dir / "rollouts.jsonl")
    assert [one["step"] for one in metrics] == list(range(1, STEPS + 1))
    assert all(one["engine_gap"] < 1e-3 for one in metrics if one["staleness"] == 0)
    assert not [row["error"] for row in rows if row["error"]]
    assert set(Counter((row["case_id"], row["sample"]) for row in rows).values()) == {1}
    check_recorded_tokens(run_dir)

    prefixes, versions = zip(*map(find_versions, sent), strict=True)
    assert [len(one) for one in prefixes] == [1, 1]
    assert prefixes[0] != prefixes[1], "servers that share a directory of adapters keep them apart"
    assert versions[0] == versions[1] >= set(range(1, STEPS)), "each server has every version"

    prompts = [{tuple(body["prompt"]) for path, body in one if path == "/v1/completions"} for one in sent]
    episodes: dict[str, list[tuple[int, ...]]] = {}
    for row in read_lines(run_dir / "agent_answers" / "rank00000.jsonl"):
        if row["event"] == "answer" and row["continues"] is not None:
            episodes.setdefault(row["episode"], []).append(tuple(row["prompt_ids"]))
    homes = [[number for number in range(2) if set(asked) <= prompts[number]] for asked in episodes.values()]
    assert all(homes), "a dialogue stays with its server"
    assert min(Counter(home for (home, *_) in homes).values()) >= len(homes) // 4, "and both have some"
    for server in servers:
        listed = httpx.get(f"{address_of(server)}/v1/models").json()["data"]
        assert [row["parent"] for row in listed] == [None], "the run takes its adapters with it"


def test_a_server_that_does_not_come_back_is_named(servers: list[Server], tmp_path: Path) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    made = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(TINY_BASE), peft.LoraConfig(r=RANK))
    made.save_pretrained(str(tmp_path / "adapter"))
    config = ServerConfig(url=",".join(map(address_of, servers)), max_wait_s=1.0)
    engine = open_server_engine(config, ChatTemplate(TINY_BASE), tmp_path)
    engine.publish(tmp_path / "adapter", 1)
    servers[0].kill()
    with pytest.raises(ConfigError, match=rf"{address_of(servers[0])}: unavailable for .* Start the server, and run"):
        engine.publish(tmp_path / "adapter", 2)
    engine.close()
    listed = httpx.get(f"{address_of(servers[1])}/v1/models").json()["data"]
    assert [row["parent"] for row in listed] == [None]
