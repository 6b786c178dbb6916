"""Measure how busy rollouts keep the servers of a policy, with answers whose lengths have a heavy tail.

    python -m benchmarks.rollouts [--staleness 1 2 4] [--slots 64] [--servers 1] [--steps 12] [--torch] [--out FILE]

A simulated server (a process with HTTP and vLLM's API) answers as many requests at a time as it has slots; the seconds
of an answer are lognormal (mean 0.5, sigma 1.2: one in a hundred takes over 4), and dialogues have one to six turns.
The scheduler, client and steps' data are those of training; the training itself is a pause of ``--train`` seconds, or
with ``--torch`` matrix products in this process, which compete for its interpreter. The busy share is the time that
slots answered, of all slots' time between the second and the last but one step. The versions that are published are
empty adapters. Also in the result: steps a minute, staleness, and whether an answer was lost or trained twice.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import math
import multiprocessing
import platform
import random
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import distributed
from torch._C._distributed_c10d import HashStore

from fctune.base.distributed import World
from fctune.config.loading import load_config
from fctune.config.schema import RunConfig
from fctune.data.chat_template import ChatTemplate
from fctune.data.conversation import Conversation, Message
from fctune.models.attention import make_bounds
from fctune.tasks.episode import Episode, EpisodeLimits
from fctune.tasks.rollouts import RolloutSettings, TaskSet
from fctune.tasks.sampling.collection import TaskOrder
from fctune.tasks.sampling.task_sets import open_server_engine
from fctune.tasks.task import DialogueState, Step, Task, TaskState
from fctune.training.rollout_source import RolloutSource

BASE = Path(__file__).resolve().parents[1] / "fctune" / "assets" / "tiny_base"
MEAN_S, SIGMA, MAX_TURNS, NUM_TASKS = 0.5, 1.2, 6, 1000


class SimulatedServer:
    """The part of vLLM's API that rollouts use, on a number of slots; ``serve`` runs it in this process."""

    def __init__(self, num_slots: int):
        from transformers import AutoTokenizer

        self._slots = asyncio.Semaphore(num_slots)
        self._tokenizer = AutoTokenizer.from_pretrained(BASE)
        self._num_busy, self._busy_s, self._since = 0, 0.0, time.monotonic()

    def serve(self, port: Any) -> None:
        """Serve on a free port, which is put into a pipe."""

        async def run() -> None:
            server = await asyncio.start_server(self._connect, "127.0.0.1", 0, backlog=1024)
            port.send(server.sockets[0].getsockname()[1])
            await server.serve_forever()

        asyncio.run(run())

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                path, size = head.split(b" ", 2)[1].decode(), 0
                for line in head.lower().split(b"\r\n"):
                    if line.startswith(b"content-length:"):
                        size = int(line.partition(b":")[2])
                body = json.loads(await reader.readexactly(size)) if size else {}
                sent = json.dumps(await self._answer(path, body)).encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(sent), sent))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def _answer(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/v1/completions":
            return await self._complete(body)
        if path == "/tokenize":
            return {"tokens": self._tokenizer.encode(body["prompt"], add_special_tokens=False)}
        if path == "/busy":
            self._count(0)
            return {"busy_s": self._busy_s}
        return {"data": [{"id": "base", "parent": None, "max_model_len": 100_000}]}

    async def _complete(self, body: dict[str, Any]) -> Any:
        async with self._slots:
            draw = random.Random(body["seed"])
            self._count(1)
            await asyncio.sleep(draw.lognormvariate(math.log(MEAN_S) - SIGMA**2 / 2, SIGMA))
            self._count(-1)
        ids = [100 + draw.randrange(400) for _ in range(6)] + body["stop_token_ids"][:1]
        choice = {"token_ids": ids, "prompt_token_ids": body["prompt"], "finish_reason": "stop"}
        return {"choices": [choice | {"logprobs": {"token_logprobs": [-1.0] * len(ids)}}]}

    def _count(self, change: int) -> None:
        now = time.monotonic()
        self._busy_s += self._num_busy * (now - self._since)
        self._since, self._num_busy = now, self._num_busy + change


def _serve(num_slots: int, port: Any) -> None:
    SimulatedServer(num_slots).serve(port)


class _Talk(DialogueState):
    def __init__(self, task_id: str):
        super().__init__(Conversation((Message("user", f"Talk about {task_id}."),), (), task_id))
        self._num_left = 0

    def respond(self, step: Step) -> Sequence[Message]:
        """Ask on for a number of turns that the first answer decides."""
        if not self._num_left:
            self._num_left = 1 + _draw(step.answer.text, MAX_TURNS)
        self._num_left -= 1
        return (Message("user", "Go on."),) if self._num_left else ()


class _TalkTask(Task):
    category = "talk"

    def __init__(self, number: int):
        self.id = f"talk {number}"

    def start(self) -> TaskState:
        """Return the state before the first answer."""
        return _Talk(self.id)


class TalkTasks(TaskSet):
    """Dialogues of one to six turns, of which two fifths are solved by chance; some groups teach nothing."""

    parts: ClassVar[Mapping[str, str]] = {"solved": "by chance"}
    default_weights: ClassVar[Mapping[str, float]] = {"solved": 1.0}

    def __init__(self, template: ChatTemplate):
        super().__init__(RolloutSettings(template, EpisodeLimits(64, max_turns=MAX_TURNS, max_tokens=2048)))
        self._tasks = {task.id: task for task in map(_TalkTask, range(NUM_TASKS))}

    @property
    def ids(self) -> Sequence[str]:
        """Ids of the tasks."""
        return list(self._tasks)

    def digest(self) -> str:
        """Return a name that stands for all tasks."""
        return "talk"

    def open(self, task_id: str) -> Task:
        """Return the task of an id."""
        return self._tasks[task_id]

    def score(self, episode: Episode) -> Mapping[str, float]:
        """Return whether the task is solved, by chance."""
        return {"solved": float(_draw(episode.steps[-1].answer.text, 5) < 2)}


def _draw(text: str, count: int) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big") % count


def main(argv: Sequence[str] | None = None) -> int:
    """Measure each setting, and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--staleness", type=int, nargs="+", default=[1, 2, 4], help="default: %(default)s")
    parser.add_argument("--slots", type=int, default=64, help="answers at a time of all servers; default: %(default)s")
    parser.add_argument("--at-once", type=int, help="dialogues at a time; default: one and a half times the slots")
    parser.add_argument("--servers", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=12, help="default: %(default)s")
    parser.add_argument("--prompts", type=int, default=16, help="prompts of a step; default: %(default)s")
    parser.add_argument("--group", type=int, default=4, help="answers to a prompt; default: %(default)s")
    parser.add_argument("--train", type=float, default=1.0, help="seconds of training a step; default: %(default)s")
    parser.add_argument("--torch", action="store_true", help="train with matrix products in this process")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(argv)
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    runs = []
    for staleness in arguments.staleness:
        runs.append(measure(arguments, staleness))
        print(json.dumps(runs[-1]), flush=True)
    if arguments.out is not None:
        machine = {"python": platform.python_version(), "command": " ".join(sys.argv)}
        arguments.out.write_text(json.dumps({"machine": machine, "runs": runs}, indent=1) + "\n")
    return 0


def measure(arguments: argparse.Namespace, staleness: int) -> dict[str, Any]:
    """Run all steps once with fresh servers."""
    processes, urls = [], []
    for _ in range(arguments.servers):
        parent, child = multiprocessing.Pipe()
        made = multiprocessing.get_context("spawn").Process(
            target=_serve, args=(arguments.slots // arguments.servers, child), daemon=True
        )
        made.start()
        processes.append(made)
        urls.append(f"http://127.0.0.1:{parent.recv()}")
    try:
        with tempfile.TemporaryDirectory() as folder:
            return _run(arguments, staleness, urls, Path(folder))
    finally:
        for process in processes:
            process.kill()


def _run(arguments: argparse.Namespace, staleness: int, urls: Sequence[str], folder: Path) -> dict[str, Any]:
    at_once = arguments.at_once or arguments.slots * 3 // 2
    overrides = [
        *(f"output_dir={folder}", f"grpo.prompts_per_step={arguments.prompts}", f"grpo.group_size={arguments.group}"),
        *("grpo.engine=server", f"grpo.server.url={','.join(urls)}", f"grpo.server.concurrency={at_once // len(urls)}"),
        *(f"grpo.max_staleness={staleness}", f"model.path={BASE}"),
    ]
    config: RunConfig = load_config("tiny_grpo", overrides)
    assert config.grpo is not None
    assert config.grpo.server is not None
    policy = folder / "policy"
    policy.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (policy / name).write_text("{}")
    template = ChatTemplate(BASE)
    tasks = TalkTasks(template)
    engine = open_server_engine(config.grpo.server, template, folder)
    source = RolloutSource(
        *(config, tasks, TaskOrder(tasks.ids, config.seed), engine, World(0, 1, 0, torch.device("cpu"))),
        *(lambda lengths: make_bounds(lengths, "per_document"), lambda version: engine.publish(policy, version)),
        log=folder / "rollouts.jsonl",
        num_steps=arguments.steps,
        is_shared=True,
    )
    marks: list[tuple[float, float]] = []
    metrics = []
    with source:
        for step in range(1, arguments.steps + 1):
            metrics.append(source.take(step).metrics)
            marks.append((time.monotonic(), sum(_read_busy(url) for url in urls)))
            if step < arguments.steps:
                _train(arguments.train, arguments.torch)
    rows = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    (started, busy_before), (ended, busy_after) = marks[1], marks[-2]
    seen = Counter((row["case_id"], row["sample"], tuple(row["ids"])) for row in rows)
    return {
        "staleness_allowed": staleness,
        "busy_share": (busy_after - busy_before) / (ended - started) / arguments.slots,
        "steps_per_minute": 60 * (len(marks) - 3) / (ended - started),
        "groups_per_step": statistics.fmean(one["answers_trained"] for one in metrics) / arguments.group,
        "staleness_mean": statistics.fmean(one["staleness"] for one in metrics),
        "staleness_max": max(one["staleness"] for one in metrics),
        "answers": len(rows),
        "answers_twice": sum(count > 1 for count in seen.values()),
        "slots": arguments.slots,
        "dialogues_at_once": at_once,
        "servers": arguments.servers,
        "answers_per_step": arguments.prompts * arguments.group,
        "train_s": arguments.train,
        "trains_in_torch": arguments.torch,
        "threads": threading.active_count(),
    }


def _read_busy(url: str) -> float:
    with urllib.request.urlopen(f"{url}/busy", timeout=60) as answer:
        return float(json.load(answer)["busy_s"])


def _train(seconds: float, is_torch: bool) -> None:
    if not is_torch:
        time.sleep(seconds)
        return
    ended, weight = time.monotonic() + seconds, torch.randn(64, 64, requires_grad=True)
    while time.monotonic() < ended:  # many small operators, as a step that launches kernels
        (weight @ weight).relu().sum().backward()


if __name__ == "__main__":
    sys.exit(main())
