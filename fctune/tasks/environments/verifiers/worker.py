"""Plays episodes of a verifiers environment: the package runs the rollout, and whoever started this process answers.

    PYTHON -P worker.py '{"env": {"taskset": {"id": "NAME"}}, "num_tasks": 100, "max_turns": 8, "concurrency": 4}'

PYTHON has verifiers (0.4) and the environment, and need not have fctune, so nothing of it is imported here. Requests
and replies are lines of JSON on stdin and stdout:

    <- {"tasks": [{"messages": [...], "name": ...}, ...]}           once, at the start
    -> {"do": "start", "episode": 1, "task": 0}
    <- {"episode": 1, "messages": [...], "tools": [...]}            the complete conversation; the model is to answer
    -> {"do": "answer", "episode": 1, "message": {...}}
    <- {"episode": 1, "reward": 0.8, "rewards": {"reached": 0.8}}   or {"episode": 1, "error": "..."}
    -> {"do": "finish", "episode": 1}                               scores what there is, without a further answer
    -> {"do": "close", "episode": 1}

Model calls take the package's own path, through its interception server, so its limits, stops and hooks apply.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import threading
import traceback
from itertools import islice
from typing import Any

import httpx
import verifiers.v1 as vf
from aiohttp import web
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

__all__ = ["PolicyHarness"]

_SESSION = "X-Session-ID"  # verifiers.v1.clients.client.SESSION_ID_HEADER


class PolicyHarness(vf.Harness[vf.HarnessConfig]):
    """A chat loop in this process: asks the model, makes its calls, and ends with an answer without calls."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Play the conversation to its end, or until the rollout refuses a further turn."""
        messages = to_messages(*self.resolve_prompt(data))
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        headers = {"Authorization": f"Bearer {secret}"}
        async with contextlib.AsyncExitStack() as stack:
            client = await stack.enter_async_context(httpx.AsyncClient(timeout=None, headers=headers, trust_env=False))
            tools, dispatch, connections = await connect_mcp({"mcpServers": servers}, stack)
            while True:
                body = {"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})}
                response = await client.post(f"{endpoint}/chat/completions", json=body)
                if response.status_code != 200:
                    if trace.stop_condition is None and trace.id not in FINISHED:
                        raise vf.HarnessError(f"no answer: {response.text[:400]}")
                    break
                message = response.json()["choices"][0]["message"]
                messages.append(message)
                for call in message.get("tool_calls") or ():
                    function = call["function"]
                    if function["name"] in dispatch:
                        arguments = json.loads(function["arguments"])
                        content = await call_mcp(connections, dispatch, function["name"], arguments)
                    else:
                        content = f"error: unknown tool {function['name']}"
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
                if not message.get("tool_calls"):
                    break
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


FINISHED: set[str] = set()  # ids of traces that get no further answer


class Episode:
    """An episode in progress: the model call that waits for its answer."""

    def __init__(self, number: int):
        self.number, self.trace_id = number, ""
        self.waiting: asyncio.Future[dict[str, Any] | None] | None = None
        self.is_finished = False
        self.task: asyncio.Task[None] | None = None


class Worker:
    """The environment and its episodes.

    Args:
        config: What the command line holds.
        output: Where replies are written.
    """

    def __init__(self, config: dict[str, Any], output: int):
        self._config, self._output = config, output
        self._episodes: dict[int, Episode] = {}
        self._by_trace: dict[str, Episode] = {}
        self._slots = asyncio.Semaphore(config["concurrency"])

    def send(self, reply: dict[str, Any]) -> None:
        """Write a reply as one line of JSON, whole even where the pipe takes a part at a time."""
        content = json.dumps(reply).encode() + b"\n"
        while content:
            content = content[os.write(self._output, content) :]

    async def run(self) -> None:
        """Serve requests until stdin ends."""
        requests: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        threading.Thread(target=_read, args=(asyncio.get_running_loop(), requests), daemon=True).start()
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/v1/chat/completions", self._complete)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        sys.modules["fctune_policy"] = sys.modules["__main__"]
        given = self._config["env"]
        agent = {
            "harness": {"id": "fctune_policy"},
            "runtime": {"type": "subprocess"},
            "max_turns": self._config["max_turns"],
            **given.get("agent", {}),
        }
        env = vf.load_environment(vf.resolve_env_config({**given, "agent": agent}))
        client = vf.EvalClientConfig(base_url=f"http://127.0.0.1:{port}/v1", api_key_var="FCTUNE_NO_KEY")
        context = vf.ModelContext(model="policy", client=client)
        async with env.serving():
            tasks = list(islice(env.taskset, self._config["num_tasks"]))
            prompts = [to_messages(task.data.system_prompt, task.data.prompt) for task in tasks]
            shown = zip(tasks, prompts, strict=True)
            self.send({"tasks": [{"messages": prompt, "name": task.data.name} for task, prompt in shown]})
            while (request := await requests.get()) is not None:
                number = request["episode"]
                if request["do"] == "start":
                    episode = self._episodes[number] = Episode(number)
                    episode.task = asyncio.create_task(self._play(env, context, tasks[request["task"]], episode))
                elif (known := self._episodes.get(number)) is not None:
                    self._continue(known, request)

    async def _play(self, env: vf.Env, context: vf.ModelContext, task: vf.Task, episode: Episode) -> None:
        def watch(trace: vf.Trace) -> None:
            if episode.trace_id:
                raise ValueError("the environment runs several agents, or one several times; only one can be trained")
            episode.trace_id = trace.id
            self._by_trace[trace.id] = episode

        try:
            async with self._slots:
                played = await env.run_episode(task, context, on_trace=watch)
            errors = [*played.errors, *(error for trace in played.traces for error in trace.errors)]
            if not played.ok or not played.traces:
                last = f"{errors[-1].type}: {errors[-1].message}" if errors else "the episode has no trace"
                self.send({"episode": episode.number, "error": last})
                return
            (trace,) = played.traces
            rewards = {name: reward.value for name, reward in trace.rewards.items()}
            self.send({"episode": episode.number, "reward": trace.reward, "rewards": rewards})
        except Exception as error:
            self.send({"episode": episode.number, "error": f"{type(error).__name__}: {error}"})
        finally:
            self._by_trace.pop(episode.trace_id, None)
            FINISHED.discard(episode.trace_id)
            self._episodes.pop(episode.number, None)

    def _continue(self, episode: Episode, request: dict[str, Any]) -> None:
        if request["do"] == "close":
            if episode.task is not None:
                episode.task.cancel()
            return
        if request["do"] == "finish":
            episode.is_finished = True
            FINISHED.add(episode.trace_id)
        if episode.waiting is not None and not episode.waiting.done():
            episode.waiting.set_result(request.get("message"))

    async def _complete(self, request: web.Request) -> web.Response:
        """Answer a model call with what the starter of this process says."""
        body, episode = await request.json(), self._by_trace.get(request.headers.get(_SESSION, ""))
        if episode is None or body.get("stream"):
            return _refuse("unknown rollout" if episode is None else "answers are not streamed")
        message = None
        if not episode.is_finished:
            episode.waiting = asyncio.get_running_loop().create_future()
            self.send({"episode": episode.number, "messages": body["messages"], "tools": body.get("tools") or []})
            message = await episode.waiting
        if message is None:
            return _refuse("no further answer")
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        choice = {"index": 0, "finish_reason": reason, "message": {"role": "assistant", **message}}
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        head = {"id": "policy", "object": "chat.completion", "created": 0, "model": "policy"}
        return web.json_response({**head, "choices": [choice], "usage": usage})


def to_messages(system: str | None, prompt: Any) -> list[dict[str, Any]]:
    """Return a prompt as messages of OpenAI's API."""
    if isinstance(prompt, str):
        said = [{"role": "user", "content": prompt}]
    else:
        said = [message_to_wire(message) for message in prompt or ()]
    return ([{"role": "system", "content": system}] if system is not None else []) + said


def _refuse(reason: str) -> web.Response:
    return web.json_response({"error": {"message": reason, "type": "invalid_request_error"}}, status=400)


def _read(loop: asyncio.AbstractEventLoop, requests: asyncio.Queue[dict[str, Any] | None]) -> None:
    for line in sys.stdin.buffer:
        loop.call_soon_threadsafe(requests.put_nowait, json.loads(line))
    loop.call_soon_threadsafe(requests.put_nowait, None)


def main() -> None:
    """Play episodes until stdin ends; whatever the environment prints goes to stderr."""
    output = os.dup(1)
    os.dup2(2, 1)
    code = 0
    try:
        asyncio.run(Worker(json.loads(sys.argv[1]), output).run())
    except BaseException as error:
        code = 1
        traceback.print_exc()
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
    sys.stderr.flush()
    os._exit(code)  # the thread that reads stdin holds its lock, without which Python does not end


if __name__ == "__main__":
    main()
