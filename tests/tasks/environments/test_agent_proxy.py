"""Agents behind the proxy: the tokens that were sampled are those that are recorded, each once, whatever clients do."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fctune.base.errors import ConfigError, DataError
from fctune.calls.formats.registry import detect_format
from fctune.cli import main
from fctune.data.chat_template import ChatTemplate
from fctune.data.conversation import Call, Conversation, Message, Tool
from fctune.engines.engine import Answer, Prompt
from fctune.engines.server_answers import read_chat_answer, read_chat_events
from fctune.tasks.environments.agent.proxy import AgentProxy
from fctune.tasks.environments.agent.sessions import AgentSession, AnswerLog, SessionLimits, merge_answers
from fctune.tasks.episode import Episode, EpisodeLimits, EpisodeRunner
from fctune.tasks.task import DialogueState, Step, Task, TaskState, to_results
from tests.conftest import ROOT, TINY_BASE
from tests.engines.vllm_stand_in import VllmStandIn
from tests.ranks import find_port
from tests.tasks.token_engine import ScriptedEngine

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
USER = {"role": "user", "content": "How is the weather in Oslo and in Rome?"}
CALLS = [Call("get_weather", {"city": "Oslo"}), Call("get_weather", {"city": "Rome"})]
RESULTS = ['{"sky": "clear"}', '{"sky": "grey"}']
LIMITS = SessionLimits(max_new_tokens=200, max_context=3000)


class ServerLikeEngine(ScriptedEngine):
    """A scripted engine that may be asked on several threads, as a server's; it waits while ``is_answering`` is off."""

    is_concurrent = True

    def __init__(self, template: ChatTemplate, answer: Callable[[str], str]):
        super().__init__(template, answer)
        self.is_answering = threading.Event()
        self.is_answering.set()
        self.lock, self.num_open, self.max_open = threading.Lock(), 0, 0

    def answer(self, prompts: Sequence[Prompt]) -> Iterator[Answer]:
        with self.lock:
            self.num_open += 1
            self.max_open = max(self.max_open, self.num_open)
        assert self.is_answering.wait(60)
        try:
            yield from super().answer(prompts)
        finally:
            with self.lock:
                self.num_open -= 1


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return ChatTemplate(TINY_BASE)


@pytest.fixture(scope="module")
def weather(template: ChatTemplate) -> Callable[[str], str]:
    """Two calls for a question, an answer for their results, and a counted text for anything else."""
    call_format = detect_format(template.source)
    opening = template.decode(template.encode_continuation(_after_results(), 1))

    def answer(text: str) -> str:
        if text.endswith(opening):
            return "Clear in Oslo, grey in Rome."
        return call_format.render(CALLS) if "weather in Oslo" in text[-300:] else f"Answer to {len(text)}."

    return answer


def _after_results() -> Conversation:
    calls = tuple(Call(call.name, call.arguments, f"call{i:05d}") for i, call in enumerate(CALLS, start=1))
    asked = Message("user", USER["content"]), Message("assistant", None, calls)
    return Conversation((*asked, *to_results(calls, RESULTS)), (Tool(TOOL["function"]),))  # type: ignore[arg-type]


@contextmanager
def serve(
    template: ChatTemplate, engine: Any, limits: SessionLimits = LIMITS, **options: Any
) -> Iterator[tuple[AgentProxy, AgentSession, Callable[..., Any]]]:
    proxy = AgentProxy(engine, template, detect_format(template.source), limits, **options)
    session = proxy.begin("one/episode", 5)
    try:
        yield proxy, session, lambda **fields: post(proxy.base_url("one/episode"), **fields)
    finally:
        proxy.close()


def post(url: str, headers: dict[str, str] | None = None, path: str = "/chat/completions", **fields: Any) -> Any:
    """Return the reply to a request, its events if it is streamed; raises ``HTTPError``."""
    body = json.dumps({"messages": [USER]} | fields).encode()
    request = urllib.request.Request(url + path, body, {"Content-Type": "application/json"} | (headers or {}))
    with urllib.request.urlopen(request, timeout=60) as reply:
        if not fields.get("stream"):
            return json.load(reply)
        data = [line[len(b"data: ") :] for line in reply.read().split(b"\n\n") if line.startswith(b"data: ")]
        assert data.pop() == b"[DONE]"
        return [json.loads(one) for one in data]


def refused(send: Callable[[], Any]) -> tuple[int, str, str]:
    """Return status, code and message of the error that a request gets."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        send()
    error = json.load(caught.value)["error"]
    return caught.value.code, error["code"], error["message"]


def converse(send: Callable[..., Any], **fields: Any) -> list[dict[str, Any]]:
    """Let an agent ask, give the results of the calls, and ask once more; returns the messages."""
    messages: list[dict[str, Any]] = [USER]
    for following in ([], [{"role": "user", "content": "Thanks. And tomorrow?"}], None):
        while True:
            message = send(messages=messages, tools=[TOOL], **fields)["choices"][0]["message"]
            messages.append({key: value for key, value in message.items() if value is not None})
            calls = message.get("tool_calls", [])
            pairs = zip(calls, RESULTS, strict=True) if calls else ()
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": result} for call, result in pairs]
            if not calls:
                break
        if following is None:
            return messages
        messages += following or [{"role": "user", "content": "Say it again."}]
    raise AssertionError


class WeatherTask(Task, TaskState):
    """The same conversation as ``converse``, as a task of fctune's own episodes."""

    id = category = "weather"
    is_dialogue = True

    def __init__(self) -> None:
        TaskState.__init__(self, Conversation((Message("user", str(USER["content"])),), (Tool(TOOL["function"]),)))  # type: ignore[arg-type]
        self._next = ["Say it again.", "Thanks. And tomorrow?"]

    def start(self) -> TaskState:
        return self

    describe_error = DialogueState.describe_error

    def respond(self, step: Step) -> Sequence[Message]:
        if step.calls:
            return to_results(step.calls, RESULTS)
        return (Message("user", self._next.pop(0)),) if self._next else ()


def test_an_agent_is_trained_on_the_tokens_of_the_same_episode_in_fctune(
    template: ChatTemplate, weather: Callable[[str], str], tmp_path: Path
) -> None:
    own = Episode(WeatherTask(), seed=5)
    runner = EpisodeRunner(
        ScriptedEngine(template, weather),
        detect_format(template.source),
        EpisodeLimits(200, max_tokens=3000),
        template=template,
        acts_on="strict",
    )
    (own,) = runner.run([own])
    engine, log = ServerLikeEngine(template, weather), AnswerLog(tmp_path / "answers.jsonl")
    with serve(template, engine, log=log) as (_, session, send):
        messages = converse(send)
        (sequence,) = merge_answers(session.answers)
    assert [message["role"] for message in messages].count("assistant") == 4
    assert own.tokens == sequence
    rows = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [tuple(row["prompt_ids"]) for row in rows] == engine.prompts, "what is recorded is what was asked"
    assert [row["continues"] for row in rows] == [None, 1, 2, 3]
    generated = [token for row in rows for token in row["ids"]]
    assert generated == [i for i, is_new in zip(sequence.ids, sequence.is_generated, strict=True) if is_new]
    assert [logprob for row in rows for logprob in row["logprobs"]] == [one for one in sequence.logprobs if one]
    assert {row["version"] for row in rows} == {engine.version}


def test_a_history_that_was_rewritten_is_a_sequence_of_its_own_and_no_token_is_trained_twice(
    template: ChatTemplate, weather: Callable[[str], str]
) -> None:
    with serve(template, ServerLikeEngine(template, weather)) as (_, session, send):
        messages = converse(send)
        summary = [{"role": "system", "content": "So far: weather."}, {"role": "user", "content": "Which city first?"}]
        send(messages=summary)
        send(messages=[*messages[:-1], {"role": "user", "content": "Another branch."}], tools=[TOOL])
        send(messages=[*messages, {"role": "user", "content": "On."}], tools=[TOOL])
        answers, sequences = session.answers, merge_answers(session.answers)
    assert len(sequences) == 3
    assert sum(sum(one.is_generated) for one in sequences) == sum(len(one.tokens.ids) for one in answers)
    assert sequences[2].prompt_ids[: len(sequences[0].prompt_ids)] == sequences[0].prompt_ids, "context, not trained"
    for sequence in sequences:  # every trained token follows what the policy saw before it
        ends = [at for at, is_new in enumerate(sequence.is_generated) if is_new]
        prompts = {one.tokens.prompt_ids: one.tokens.ids for one in answers}
        at = ends[0]
        assert prompts[sequence.context[: len(sequence.prompt_ids) + at]][0] == sequence.ids[at]


def test_a_stream_says_the_same_as_a_reply(template: ChatTemplate, weather: Callable[[str], str]) -> None:
    for fields in ({"tools": [TOOL]}, {"messages": [{"role": "user", "content": "Hello"}]}):
        with serve(template, ServerLikeEngine(template, weather)) as (_, _session, send):
            at_once = read_chat_answer(send(**fields))
            events = send(**fields, stream=True, stream_options={"include_usage": True})
        streamed = read_chat_events(iter([*events, None]))
        assert (streamed.text, streamed.is_cut, streamed.num_tokens) == (at_once.text, False, at_once.num_tokens)
        assert bool(streamed.text) != bool(streamed.tool_calls)
        pieces = [[call["function"] for call in answer.tool_calls or ()] for answer in (streamed, at_once)]
        assert pieces[0] == pieces[1]


def test_requests_that_are_repeated_get_the_answer_to_the_first(
    template: ChatTemplate, weather: Callable[[str], str]
) -> None:
    engine = ServerLikeEngine(template, weather)
    with serve(template, engine) as (_, session, send), ThreadPoolExecutor(8) as pool:
        engine.is_answering.clear()
        twins = [pool.submit(send) for _ in range(3)]
        wait_for(lambda: session.num_repeats == 2)
        engine.is_answering.set()
        assert len({twin.result()["id"] for twin in twins}) == 1
        assert len(session.answers) == 1
        retried = send(headers={"x-stainless-retry-count": "1"})
        assert retried["id"] == twins[0].result()["id"]
        keyed = [send(headers={"Idempotency-Key": key})["id"] for key in ("a", "a", "b")]
        assert len(set(keyed)) == 2
        assert keyed[0] == keyed[1]
        assert send()["id"] not in {*keyed, retried["id"]}, "an agent may ask the same once more"
    seeds = [answer.tokens.prompt_ids for answer in session.answers]
    assert len(seeds) == len(engine.prompts) == 4


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_answer_that_its_client_did_not_wait_for_is_sent_again_and_only_then_trained(
    is_stream: bool, template: ChatTemplate, weather: Callable[[str], str], tmp_path: Path
) -> None:
    engine, log = ServerLikeEngine(template, weather), AnswerLog(tmp_path / "answers.jsonl")
    with serve(template, engine, log=log) as (proxy, session, send):
        engine.is_answering.clear()
        host, _, port = proxy.url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port))) as client:
            body = json.dumps({"messages": [USER], "stream": is_stream}).encode()
            head = f"POST /episode/one%2Fepisode/v1/chat/completions HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
            wait_for(lambda: engine.num_open == 1)
        engine.is_answering.set()
        wait_for(lambda: '"lost"' in read_text(tmp_path / "answers.jsonl"))
        assert session.answers == []
        send(stream=is_stream)
        assert len(session.answers) == len(engine.prompts) == 1
    events = [json.loads(line)["event"] for line in read_text(tmp_path / "answers.jsonl").splitlines()]
    assert events == ["answer", "lost", "received"]


def test_parallel_requests_wait_for_a_place_and_each_has_its_own_tokens(
    template: ChatTemplate, weather: Callable[[str], str]
) -> None:
    def ask_all() -> tuple[list[Any], int]:
        engine = ServerLikeEngine(template, weather)
        with serve(template, engine, concurrency=3) as (_, session, send), ThreadPoolExecutor(12) as pool:
            engine.is_answering.clear()
            asked = [[{"role": "user", "content": f"Part {part}"}] for part in range(12)]
            running = [pool.submit(send, messages=one) for one in asked]
            wait_for(lambda: engine.num_open == 3)
            time.sleep(0.1)
            engine.is_answering.set()
            assert len({one.result()["id"] for one in running}) == 12
            return sorted(one.tokens.prompt_ids for one in session.answers), engine.max_open

    first, max_open = ask_all()
    assert max_open == 3
    assert len(set(first)) == 12
    assert ask_all()[0] == first


def test_seeds_depend_on_what_is_asked_and_not_on_its_order(template: ChatTemplate) -> None:
    seeds: list[dict[tuple[int, ...], int | None]] = []
    for order in ([0, 1, 2, 2], [2, 2, 1, 0]):
        asked: dict[Any, int | None] = {}

        class Engine(ScriptedEngine):
            is_concurrent = True

            def answer(self, prompts: Sequence[Prompt], asked: dict[Any, int | None] = asked) -> Iterator[Answer]:
                key = (prompts[0].ids, sum(ids == prompts[0].ids for ids, _ in asked))
                asked[key] = prompts[0].seed
                return super().answer(prompts)

        with serve(template, Engine(template, lambda text: "Yes.")) as (_, _session, send):
            for part in order:
                send(messages=[{"role": "user", "content": f"Part {part}"}])
        seeds.append(asked)
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0].values())) == 4


def test_an_answer_ends_at_a_stop_text_and_is_trained_up_to_it(template: ChatTemplate) -> None:
    engine = ServerLikeEngine(template, lambda text: "Thought: look.\nObservation: made up, at length.")
    with serve(template, engine) as (_, session, send):
        choice = send(stop=["\nObservation"])["choices"][0]
        (answer,) = session.answers
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == "Thought: look."
    text, shorter = (template.decode(answer.tokens.ids[:count]) for count in (None, -1))
    assert "\nObservation" in text
    assert "\nObservation" not in shorter
    assert len(answer.tokens.logprobs) == len(answer.tokens.ids)


def test_limits_end_an_episode_in_plain_words(template: ChatTemplate) -> None:
    def ask(limits: SessionLimits, count: int) -> tuple[AgentSession, tuple[int, str, str]]:
        engine = ServerLikeEngine(template, lambda text: "word " * 30)
        with serve(template, engine, limits) as (_, session, send):
            for _ in range(count):
                send()
            return session, refused(send)

    session, error = ask(SessionLimits(200, 3000, max_answers=2), 2)
    assert error == (403, "episode_limit", "the episode has had its 2 answers")
    assert session.is_cut
    session, error = ask(SessionLimits(31, 3000, max_generated=40), 2)
    assert error == (403, "episode_limit", "the episode has had its 40 generated tokens")
    assert [len(one.tokens.ids) for one in session.answers] == [31, 9]
    assert [one.is_cut for one in session.answers] == [True, True]
    _, error = ask(SessionLimits(200, 10), 0)
    assert error[:2] == (400, "context_length_exceeded")
    assert "leave no room for an answer within the context of 10" in error[2]
    with serve(template, ServerLikeEngine(template, lambda text: "word " * 30)) as (_, session, send):
        choice = send(max_tokens=5)["choices"][0]
        assert choice["finish_reason"] == "length"
        assert not session.answers[0].is_cut, "the agent wanted no more"
        session.close()
        assert refused(send)[:2] == (403, "episode_over")


IMAGE = [{"type": "text", "text": "See"}, {"type": "image_url", "image_url": {"url": "data:,x"}}]
BAD: dict[str, tuple[dict[str, Any], int, str]] = {
    "another model": ({"model": "gpt-4o"}, 404, "the model gpt-4o does not exist; this proxy serves policy"),
    "no messages": ({"messages": []}, 400, "messages: expected a list of messages, got list []"),
    "an image": ({"messages": [{"role": "user", "content": IMAGE}]}, 400, "a part of type 'image_url'; only text"),
    "an unknown role": ({"messages": [{"role": "robot", "content": "x"}]}, 400, "messages[0].role: expected system"),
    "a tool of another type": ({"tools": [{"type": "web_search"}]}, 400, "tools[0]: expected a function, got string"),
    "a tool without a name": ({"tools": [{"type": "function", "function": {}}]}, 400, "tools[0].function.name"),
    "several answers": ({"n": 3}, 400, "n=3: each request gets one answer"),
    "arguments that are no JSON": (
        {"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        400,
        "messages[1].tool_calls[0].function.arguments: not JSON",
    ),
    "no tokens": ({"max_tokens": 0}, 400, "max_tokens: expected a number of 1 or more"),
    "another path": ({"path": "/embeddings"}, 404, "/embeddings: this proxy serves /v1/chat/completions"),
}


def test_requests_that_cannot_be_answered_are_refused_with_the_reason(
    template: ChatTemplate, weather: Callable[[str], str]
) -> None:
    engine = ServerLikeEngine(template, weather)
    with serve(template, engine) as (proxy, session, send):
        for name, (fields, status, reason) in BAD.items():
            found = refused(lambda fields=fields: send(**fields))  # type: ignore[misc]
            assert found[0] == status, name
            assert reason in found[2], (name, found)
        assert refused(lambda: post(proxy.url + "/episode/unknown/v1"))[:2] == (404, "episode_not_found")
        assert refused(lambda: post(proxy.url + "/v1", {"Authorization": "Bearer nobody"}))[0] == 404
        found = post(proxy.url + "/v1", {"Authorization": "Bearer one/episode"})
        assert found["model"] == "policy"
        assert post(proxy.url, {"X-Episode": "one/episode"})["model"] == "policy"
        with urllib.request.urlopen(proxy.base_url("one/episode") + "/models") as reply:
            assert [row["id"] for row in json.load(reply)["data"]] == ["policy"]
        assert session.num_failed == 0
    assert len(engine.prompts) == 2, "what is refused costs nothing"


def test_a_conversation_that_the_template_refuses_is_the_clients_error(template: ChatTemplate) -> None:
    """This template raises for a result without a call before it, as some do for roles that do not alternate."""
    strict = template.source.replace(
        "{%- if", "{%- if messages[0].role == 'tool' %}{{ raise_exception('no') }}{%- endif %}{%- if", 1
    )
    assert strict != template.source
    from fctune.data.chosen_template import ChosenTemplate

    refusing = ChatTemplate(TINY_BASE, chat_template=ChosenTemplate("strict", strict))
    with serve(refusing, ServerLikeEngine(refusing, lambda text: "Yes.")) as (_, session, send):
        status, _, reason = refused(lambda: send(messages=[{"role": "tool", "tool_call_id": "x", "content": "1"}]))
        assert status == 400
        assert "the model's chat template refuses the conversation" in reason
        assert session.num_failed == 1
        assert send()["choices"][0]["message"]["content"] == "Yes."


def test_a_lost_server_is_told_to_the_agent_and_to_the_run(template: ChatTemplate) -> None:
    class Lost(ScriptedEngine):
        is_concurrent = True

        def answer(self, prompts: Sequence[Prompt]) -> Iterator[Answer]:
            raise ConfigError("http://server: unavailable for 1,800 s.")

    def fail(text: str) -> str:
        raise RuntimeError("HTTP 500: EngineCore")

    with serve(template, ServerLikeEngine(template, fail)) as (proxy, _session, send):
        status, code, reason = refused(send)
        assert (status, code) == (502, "no_answer")
        assert "HTTP 500: EngineCore" in reason
        assert proxy.failure is None
    with serve(template, Lost(template, fail)) as (proxy, _session, send):
        assert refused(lambda: send(stream=True))[0] == 503
        assert isinstance(proxy.failure, ConfigError)


def test_what_an_ended_episode_still_waits_for_is_neither_generated_nor_recorded(
    template: ChatTemplate, weather: Callable[[str], str], tmp_path: Path
) -> None:
    in_process, log = ScriptedEngine(template, weather), AnswerLog(tmp_path / "answers.jsonl")
    with serve(template, in_process, log=log) as (proxy, session, send), ThreadPoolExecutor(1) as pool:
        running = pool.submit(refused, send)
        wait_for(lambda: not proxy._waiting.empty())
        session.close()
        proxy.answer_waiting(1)
        assert running.result()[0] == 503
    assert in_process.prompts == []
    server = ServerLikeEngine(template, weather)
    with serve(template, server, log=log) as (_, session, send), ThreadPoolExecutor(1) as pool:
        server.is_answering.clear()
        running = pool.submit(refused, send)
        wait_for(lambda: server.num_open == 1)
        session.close()
        server.is_answering.set()
        assert running.result()[0] == 403
    assert read_text(tmp_path / "answers.jsonl") == ""


def test_a_port_that_is_taken_is_named(template: ChatTemplate) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="Choose another port"):
        AgentProxy(ScriptedEngine(template, str), template, None, LIMITS, port=taken.getsockname()[1])
    for host, shown in (("203.0.113.1", r"203\.0\.113\.1"), ("2001:db8::1", r"\[2001:db8::1\]")):
        with pytest.raises(ConfigError, match=rf"^{shown}:0: cannot listen there .*Choose an address of this machine"):
            AgentProxy(ScriptedEngine(template, str), template, None, LIMITS, host=host)


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6(), reason="needs IPv6")
def test_agents_reach_a_proxy_at_an_ipv6_address(template: ChatTemplate, weather: Callable[[str], str]) -> None:
    with serve(template, ServerLikeEngine(template, weather), host="::1") as (proxy, _session, send):
        assert proxy.url.startswith("http://[::1]:")
        assert send()["model"] == "policy"


def test_a_record_is_continued_by_its_ids(
    template: ChatTemplate, weather: Callable[[str], str], tmp_path: Path
) -> None:
    path, messages = tmp_path / "answers.jsonl", [USER]
    contexts: list[tuple[int, ...]] = []
    for number in range(3):
        engine = ServerLikeEngine(template, weather)
        proxy = AgentProxy(engine, template, detect_format(template.source), LIMITS, log=AnswerLog(path), is_open=True)
        try:
            message = post(proxy.base_url("mine"), messages=messages, tools=[TOOL])["choices"][0]["message"]
            (answer,) = proxy.find("mine").answers[-1:]
        finally:
            proxy.close()
        assert answer.continues == (number or None)
        assert answer.tokens.prompt_ids[: len(contexts[-1])] == contexts[-1] if contexts else True
        contexts.append((*answer.tokens.prompt_ids, *answer.tokens.ids))
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "{}"} for call in message.get("tool_calls", ())
        ]
        messages = [*messages, message, *(results or [{"role": "user", "content": "On."}])]
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(*row["prompt_ids"], *row["ids"]) for row in rows if row["event"] == "answer"] == contexts
    path.write_text("not an event\n" + path.read_text())
    with pytest.raises(DataError, match=r"answers.jsonl:1: not an event"):
        AgentProxy(engine, template, None, LIMITS, log=AnswerLog(path), is_open=True)


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_answer_that_cannot_be_recorded_is_never_sent(
    template: ChatTemplate, weather: Callable[[str], str], tmp_path: Path, is_stream: bool
) -> None:
    path, later = tmp_path / "answers.jsonl", [{"role": "user", "content": "Later?"}]
    engine, call_format = ServerLikeEngine(template, weather), detect_format(template.source)
    with serve(template, engine, log=AnswerLog(path), is_open=True) as (proxy, session, send):
        send()
        recorded = path.read_bytes()
        with full_disk(len(recorded) + 10):
            for _ in range(2):
                status, code, reason = refused(lambda: send(messages=later, stream=is_stream))
                assert (status, code) == (503, "run_over")
                assert f"{path}: an answer cannot be recorded" in reason
        assert isinstance(proxy.failure, ConfigError)
        assert len(session.answers) == 1
    assert path.read_bytes() == recorded, "a part of a line would spoil the next one"
    proxy = AgentProxy(engine, template, call_format, LIMITS, log=AnswerLog(path), is_open=True)
    try:
        post(proxy.base_url("one/episode"), messages=later)
    finally:
        proxy.close()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["number"] for row in rows if row["event"] == "answer"] == [1, 2]


def test_an_error_of_the_proxy_is_not_taken_for_a_client_that_has_gone(
    template: ChatTemplate, capfd: pytest.CaptureFixture[str]
) -> None:
    class Broken(ServerLikeEngine):
        def answer(self, prompts: Sequence[Prompt]) -> Iterator[Answer]:
            raise PermissionError(13, "no access", "/somewhere")

    with serve(template, Broken(template, str)) as (_, _session, send):
        status, code, reason = refused(send)
    assert (status, code) == (500, "internal")
    assert "/somewhere" in reason
    assert "PermissionError" in capfd.readouterr().err


@pytest.mark.thorough
def test_a_proxy_that_is_killed_continues_every_episode(tmp_path: Path) -> None:
    """With a real server behind it: what was recorded before the kill is the beginning of what follows."""
    server, out, port = VllmStandIn(TINY_BASE), tmp_path / "answers.jsonl", find_port()
    command = [sys.executable, "-m", "fctune.cli", "proxy", str(TINY_BASE), "--server", server.url, "--out", str(out)]
    command += ["--port", str(port), "--max-new-tokens", "6", "--max-answers", "3", "--context", "2000"]
    messages, url = [USER], f"http://127.0.0.1:{port}/episode/mine/v1"
    replies = []
    try:
        for number in range(2):
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
            )
            assert process.stdout is not None
            assert process.stdout.readline().startswith("ready: http://127.0.0.1:")
            if number:
                replies.append(post(url, messages=messages[:1]))  # repeated: it may not have arrived
            replies.append(post(url, messages=messages))
            messages = [*messages, replies[-1]["choices"][0]["message"], {"role": "user", "content": "On."}]
            process.send_signal(signal.SIGKILL)
            process.wait()
            with out.open("a") as file:
                file.write('{"episode": "mine", "eve')  # as a kill leaves it
    finally:
        server.stop()
    first, again, second = (reply["choices"][0]["message"] for reply in replies)
    assert first == again
    assert second != first
    *rows, _torn = out.read_text().split("\n")
    answers = [row for row in map(json.loads, rows) if row["event"] == "answer"]
    assert [row["number"] for row in answers] == [1, 2]
    asked = [body["prompt"] for path, body in server.requests if path == "/v1/completions"]
    assert [row["prompt_ids"] for row in answers] == asked


def test_the_command_refuses_what_makes_no_sense(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for words, reason in (
        ([str(TINY_BASE), "--temperature", "0"], "--temperature 0: expected more than 0"),
        ([str(TINY_BASE), "--context", "0"], "--context 0: expected 1 or more"),
        ([str(TINY_BASE), "--server", "http://127.0.0.1:9"], "no server answers there"),
        ([str(TINY_BASE), "--server", "foo:9"], "--server: foo:9 is not a server's address"),
        ([str(TINY_BASE), "--out", str(tmp_path)], f"--out {tmp_path}: is a directory. Name a file in it."),
        ([str(TINY_BASE), "--out", str(tmp_path / "loop")], "loop: cannot be read (Too many levels of symbolic links)"),
        (["http://127.0.0.1:9"], "pass the model's directory, and its server as --server"),
        (["no/such/model"], "no/such/model"),
    ):
        assert main(["proxy", *words]) == 2, words
        assert reason in capsys.readouterr().err
    server = VllmStandIn(TINY_BASE, names=["one", "two"])
    try:
        assert main(["proxy", str(TINY_BASE), "--server", server.url]) == 2
    finally:
        server.stop()
    assert "lists one, two; name the base with --served-model." in capsys.readouterr().err


@contextmanager
def full_disk(num_bytes: int) -> Iterator[None]:
    """Let no file of this process grow over a size, as on a disk that is full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def wait_for(is_true: Callable[[], bool]) -> None:
    """Wait until something holds, for a minute at most."""
    deadline = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def read_text(path: Path) -> str:
    return path.read_text() if path.exists() else ""
