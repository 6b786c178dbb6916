"""Measure how busy rollouts keep the servers of a policy, with answers whose lengths have a heavy tail.

    python -m benchmarks.rollouts [--staleness 1 2 4] [--slots 64] [--servers 1] [--steps 12] [--torch] [--process]
    python -m benchmarks.rollouts --vllm PYTHON --slots 16 --staleness 0 1 2

A simulated server (a process with HTTP and vLLM's API) answers as many requests at a time as it has slots; the seconds
of an answer are lognormal (mean 0.5, sigma 1.2: one in a hundred takes over 4), and dialogues have one to six turns.
The scheduler, client and steps' data are those of training; the training itself is a pause of ``--train`` seconds, or
with ``--torch`` steps of the tiny base in this process, which compete with the rollouts' threads for its interpreter.
``--process`` gives the rollouts a process of their own, for comparison. The busy share is the time that slots answered,
of all slots' time between the second and the last but one step. The versions that are published are empty adapters.
Also in the result: tokens a second, steps a minute, staleness, and whether an answer was lost or trained twice.

With ``--vllm``, a real vLLM of that Python serves the tiny base in place of the simulated server, one for all runs. The
versions are adapters that change nothing, and the busy share is by vLLM's own count of its requests' seconds.
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
import re
import statistics
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from peft import LoraConfig, get_peft_model
from torch import distributed
from torch._C._distributed_c10d import HashStore
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.policy_server import Server
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
from fctune.training.rollout_steps import make_step_data

BASE = Path(__file__).resolve().parents[1] / "fctune" / "assets" / "tiny_base"
MEAN_S, SIGMA, MAX_TURNS, NUM_TASKS = 0.5, 1.2, 6, 1000
WORLD = World(0, 1, 0, torch.device("cpu"))
RANK = 8  # of the adapters in vLLM


class SimulatedServer:
    """The part of vLLM's API that rollouts use, on a number of slots; ``serve`` runs it in this process."""

    def __init__(self, num_slots: int):
        self._slots = asyncio.Semaphore(num_slots)
        self._tokenizer = AutoTokenizer.from_pretrained(BASE)
        self._num_busy, self._busy_s, self._num_tokens, self._since = 0, 0.0, 0, time.monotonic()

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
            return {"busy_s": self._busy_s, "tokens": self._num_tokens}
        return {"data": [{"id": "base", "parent": None, "max_model_len": 100_000}]}

    async def _complete(self, body: dict[str, Any]) -> Any:
        async with self._slots:
            draw = random.Random(body["seed"])
            self._count(1)
            await asyncio.sleep(draw.lognormvariate(math.log(MEAN_S) - SIGMA**2 / 2, SIGMA))
            self._count(-1)
        ids = [100 + draw.randrange(400) for _ in range(6)] + body["stop_token_ids"][:1]
        self._num_tokens += len(ids)
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
    parser.add_argument("--torch", action="store_true", help="train the tiny base in this process")
    parser.add_argument("--process", action="store_true", help="collect the rollouts in a process of their own")
    parser.add_argument("--vllm", metavar="PYTHON", help="Python with a vLLM to measure")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(argv)
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    torch.set_num_threads(1)
    runs = []
    with ExitStack() as stack:
        if arguments.vllm is not None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            options = f"--max-num-seqs {arguments.slots}"
            server = Server(BASE, arguments.vllm, 8192, RANK, folder / "server.log", options)
            stack.callback(server.stop)
            server.start()
        for staleness in arguments.staleness:
            if arguments.vllm is None:
                runs.append(measure(arguments, staleness))
            else:
                runs.append(_run(arguments, staleness, [f"http://127.0.0.1:{server.port}"], folder / str(staleness)))
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
            return _run(arguments, staleness, urls, Path(folder) / "run")
    finally:
        for process in processes:
            process.kill()


def _run(arguments: argparse.Namespace, staleness: int, urls: Sequence[str], folder: Path) -> dict[str, Any]:
    policy = folder / "policy"
    policy.mkdir(parents=True)
    if arguments.vllm is None:
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            (policy / name).write_text("{}")
    else:
        get_peft_model(AutoModelForCausalLM.from_pretrained(BASE), LoraConfig(r=RANK)).save_pretrained(str(policy))
    config = _make_config(arguments, staleness, urls, folder)
    assert config.grpo is not None
    marks: list[tuple[float, float, float]] = []
    metrics = []
    trainer = _Trainer() if arguments.torch else None
    with (_collect_apart if arguments.process else _collect)(config, policy, arguments.steps) as take:
        for step in range(1, arguments.steps + 1):
            trained, epoch, measured = take(step)
            make_step_data(trained, config, WORLD, _make_bounds, step=step, epoch=epoch)
            metrics.append(measured)
            busy, tokens = map(sum, zip(*(_read_busy(url, arguments.vllm is None) for url in urls), strict=True))
            marks.append((time.monotonic(), busy, tokens))
            if step < arguments.steps:
                time.sleep(arguments.train) if trainer is None else trainer.train(arguments.train)
    rows = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    (started, busy_before, tokens_before), (ended, busy_after, tokens_after) = marks[1], marks[-2]
    seen = Counter((row["case_id"], row["sample"], tuple(row["ids"])) for row in rows)
    return {
        "staleness_allowed": staleness,
        "busy_share": (busy_after - busy_before) / (ended - started) / arguments.slots,
        "tokens_per_s": (tokens_after - tokens_before) / (ended - started),
        "steps_per_minute": 60 * (len(marks) - 3) / (ended - started),
        "groups_per_step": statistics.fmean(one["answers_trained"] for one in metrics) / arguments.group,
        "staleness_mean": statistics.fmean(one["staleness"] for one in metrics),
        "staleness_max": max(one["staleness"] for one in metrics),
        "answers": len(rows),
        "answers_twice": sum(count > 1 for count in seen.values()),
        "server": "simulated" if arguments.vllm is None else "vLLM",
        "slots": arguments.slots,
        "dialogues_at_once": config.grpo.num_at_once,
        "servers": arguments.servers,
        "answers_per_step": arguments.prompts * arguments.group,
        "train_s": arguments.train,
        "trains_in_torch": arguments.torch,
        "collects_in_a_process": arguments.process,
        "trainings_per_s": None if trainer is None else trainer.count / arguments.train / (arguments.steps - 1),
    }


def _make_config(arguments: argparse.Namespace, staleness: int, urls: Sequence[str], folder: Path) -> RunConfig:
    at_once = arguments.at_once or arguments.slots * 3 // 2
    overrides = [
        *(f"output_dir={folder}", f"grpo.prompts_per_step={arguments.prompts}", f"grpo.group_size={arguments.group}"),
        *("grpo.engine=server", f"grpo.server.url={','.join(urls)}", f"grpo.server.concurrency={at_once // len(urls)}"),
        *(f"grpo.max_staleness={staleness}", f"model.path={BASE}"),
    ]
    return load_config("tiny_grpo", overrides)


@contextmanager
def _collect(config: RunConfig, policy: Path, num_steps: int) -> Iterator[Callable[[int], Any]]:
    """Yield what returns the answers of a step, which threads of this process collect."""
    assert config.grpo is not None
    assert config.grpo.server is not None
    template, folder = ChatTemplate(BASE), policy.parent
    tasks = TalkTasks(template)
    engine = open_server_engine(config.grpo.server, template, folder)
    source = RolloutSource(
        *(config, tasks, TaskOrder(tasks.ids, config.seed), engine, WORLD, _make_bounds),
        publish=lambda version: engine.publish(policy, version),
        log=folder / "rollouts.jsonl",
        num_steps=num_steps,
        is_shared=True,
    )
    with source:
        yield source.take_answers


@contextmanager
def _collect_apart(config: RunConfig, policy: Path, num_steps: int) -> Iterator[Callable[[int], Any]]:
    """Yield the same, of a process of its own."""
    pipe, child = multiprocessing.Pipe()
    spawn = multiprocessing.get_context("spawn")
    process = spawn.Process(target=_serve_steps, args=(child, config, policy, num_steps), daemon=True)
    process.start()

    def take(step: int) -> Any:
        pipe.send(step)
        return pipe.recv()

    try:
        yield take
    finally:
        process.kill()


def _serve_steps(pipe: Any, config: RunConfig, policy: Path, num_steps: int) -> None:
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    with _collect(config, policy, num_steps) as take:
        while True:
            pipe.send(take(pipe.recv()))


def _make_bounds(lengths: Any) -> Any:
    return make_bounds(lengths, "per_document")


def _read_busy(url: str, is_simulated: bool) -> tuple[float, float]:
    """Return the seconds in which slots of a server answered, of all slots together, and its generated tokens."""
    with urllib.request.urlopen(f"{url}/{'busy' if is_simulated else 'metrics'}", timeout=60) as answer:
        text = answer.read().decode()
    if is_simulated:
        busy = json.loads(text)
        return busy["busy_s"], busy["tokens"]
    names = "request_inference_time_seconds_sum", "generation_tokens_total"
    found = [re.findall(rf"^vllm:{name}\{{.*\}} (\S+)$", text, re.MULTILINE) for name in names]
    busy_s, tokens = (math.fsum(map(float, values)) for values in found)
    return busy_s, tokens


class _Trainer:
    """Trains the tiny base, as the training between two steps does, with its interpreter lock."""

    def __init__(self) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(BASE)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=0.0)
        self._rows = torch.randint(100, 500, (4, 256))
        self.count = 0

    def train(self, seconds: float) -> None:
        """Take steps for a time."""
        ended = time.monotonic() + seconds
        while time.monotonic() < ended:
            self._model(self._rows, labels=self._rows).loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            self.count += 1


if __name__ == "__main__":
    sys.exit(main())
