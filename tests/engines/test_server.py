"""The engine for servers, against a server that works and one that fails in every way."""

from __future__ import annotations

import base64
import email.utils
import gzip
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fctune.base.errors import ConfigError
from fctune.data.chat_template import ChatTemplate
from fctune.data.conversation import Call, Conversation, Message, Tool
from fctune.engines.engine import Answer, AnswerTokens, Prompt, Sampling, make_prompts
from fctune.engines.http_client import HttpClient, RequestError, RetryPolicy
from fctune.engines.server import ServerEngine, to_messages
from tests.engines.fault_server import Handler, Log, say_user, serve

QUICK = RetryPolicy(max_attempts=4, timeout_s=0.4, first_wait_s=0.02, max_wait_s=0.1, max_retry_after_s=1.5)
KEY = "sk-secret-of-the-user"
TOOL = Tool({"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}})


def ask(log: Log, words: list[str], **options: Any) -> list[Answer]:
    engine = ServerEngine(log.url, **{"retry_policy": QUICK, "concurrency": 4, **options})
    prompts = [Conversation((Message("user", word),)) for word in words]
    answers = list(engine.answer(make_prompts(prompts, 8)))
    assert sorted(answer.index for answer in answers) == list(range(len(words))), "every prompt gets one answer"
    return sorted(answers, key=lambda answer: answer.index)


def test_answers_match_their_prompts_in_any_order_of_completion() -> None:
    def behave(handler: Handler, number: int, body: dict[str, Any]) -> None:
        time.sleep(0.03 * (number % 3 == 0))
        say_user(handler, number, body)

    with serve(behave) as log:
        answers = ask(log, [f"word {i}" for i in range(12)])
        assert [answer.text for answer in answers] == [f"word {i}" for i in range(12)]
        assert all(answer.error is None and answer.seconds for answer in answers)
        assert 1 < log.max_open <= 4


def test_servers_of_this_machine_are_asked_directly_and_others_through_the_proxy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serve(say_user) as proxy, serve(say_user, models=b'{"from": "server"}') as log:
        for name in ("HTTP_PROXY", "http_proxy"):
            monkeypatch.setenv(name, proxy.url)
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        for url in (log.url, log.url.replace("127.0.0.1", "localhost")):
            assert HttpClient(url, retry_policy=QUICK).get("/v1/models") == {"from": "server"}
        assert HttpClient("http://10.0.0.1", retry_policy=QUICK).get("/v1/models")["data"] == [{"id": "tiny"}]


def test_the_request_has_the_form_of_chat_completions() -> None:
    with serve(say_user) as log:
        engine = ServerEngine(log.url, sampling=Sampling(0.5, 7), request={"tool_choice": "none"}, retry_policy=QUICK)
        list(engine.answer([Prompt(Conversation((Message("user", "Hi"),), (TOOL,)), 33)]))
        body = log.bodies[0]
        assert body["model"] == "tiny"
        assert body["messages"] == [{"role": "user", "content": "Hi"}]
        assert body["tools"] == [{"type": "function", "function": TOOL.function}]
        assert (body["max_tokens"], body["temperature"], body["seed"], body["tool_choice"]) == (33, 0.5, 7, "none")


def test_each_result_in_the_history_carries_the_id_of_its_call() -> None:
    messages = (
        Message("user", "Add and find."),
        Message("assistant", None, (Call("add", {"a": 1}), Call("find", {"who": "Zoë"}))),
        Message("tool", "found", name="find"),
        Message("tool", "2"),
        Message("assistant", "Done."),
        Message("assistant", None, (Call("add", {"a": 2}, id="mine"),)),
        Message("tool", "3", call_id="mine"),
    )
    sent = to_messages(messages)
    calls = sent[1]["tool_calls"]
    assert calls[1]["function"]["arguments"] == '{"who": "Zoë"}'
    assert [row["tool_call_id"] for row in sent if row["role"] == "tool"] == [calls[1]["id"], calls[0]["id"], "mine"]


def test_calls_parsed_by_the_server_are_kept_as_sent() -> None:
    sent = {"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    with serve(lambda handler, *_: handler.say(None, tool_calls=[sent])) as log:
        (answer,) = ask(log, ["Hi"])
    assert answer.tool_calls == (sent,)
    assert answer.text == ""


def fail_once(fault: Any) -> Any:
    def behave(handler: Handler, number: int, body: dict[str, Any]) -> None:
        fault(handler) if number == 0 else say_user(handler, number, body)

    return behave


def finished(reason: str) -> str:
    return json.dumps({"choices": [{"message": {"content": "Hi th"}, "finish_reason": reason}]})


FAULTS = {
    "busy": lambda h: h.send(429, '{"error": {"message": "slow down"}}'),
    "broken": lambda h: h.send(500, "Internal Server Error"),
    "not ready": lambda h: h.send(503, ""),
    "not JSON": lambda h: h.send(200, "<html>busy</html>"),
    "JSON of no completion": lambda h: h.send(200, '{"choices": []}'),
    "nested beyond reading": lambda h: h.send(200, "[" * 100_000),
    "content of a wrong type": lambda h: h.say({"a": 1}),  # type: ignore[arg-type]
    "half a body": lambda h: h.send(200, '{"choices": [{"mess', length=500),
    "no body": lambda h: h.send(200, ""),
    "hanging up": lambda h: h.connection.shutdown(socket.SHUT_RDWR),
    "slow": lambda h: time.sleep(1.0),
    "aborted": lambda h: h.send(200, finished("abort")),
    "failed": lambda h: h.send(200, finished("error")),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_a_passing_fault_costs_an_attempt_and_no_answer(fault: Any) -> None:
    with serve(fail_once(fault)) as log:
        (answer,) = ask(log, ["Hi"])
        assert (answer.text, answer.error) == ("Hi", None)
        assert len(log.bodies) == 2


REASONS = {
    "busy": "HTTP 429: slow down (4 attempts)",
    "not JSON": "unusable answer: not JSON",
    "half a body": "without sending complete message body",
    "hanging up": "without sending a response",
    "slow": "no answer within 0.4 s (4 attempts)",
    "aborted": "unusable answer: finish_reason abort",
}


@pytest.mark.parametrize("name", REASONS)
def test_a_lasting_fault_is_named_and_spares_the_other_answers(name: str) -> None:
    def behave(handler: Handler, number: int, body: dict[str, Any]) -> None:
        FAULTS[name](handler) if body["messages"][0]["content"] == "word 1" else say_user(handler, number, body)

    with serve(behave) as log:
        answers = ask(log, ["word 0", "word 1", "word 2"])
    assert [answer.text for answer in answers] == ["word 0", "", "word 2"]
    assert REASONS[name] in (answers[1].error or "")


def test_a_trickling_body_is_cut_off_at_the_deadline() -> None:
    def behave(handler: Handler, number: int, body: dict[str, Any]) -> None:
        handler.send(200, "{", length=1000)
        for _ in range(100):
            time.sleep(0.05)
            handler.wfile.write(b" ")

    with serve(behave) as log:
        start = time.monotonic()
        (answer,) = ask(log, ["Hi"], retry_policy=RetryPolicy(max_attempts=1, timeout_s=0.4))
        assert time.monotonic() - start < 2
    assert "no answer within 0.4 s" in (answer.error or "")


def test_a_bad_request_is_not_retried() -> None:
    with serve(lambda handler, *_: handler.send(400, '{"detail": "context too long"}')) as log:
        (answer,) = ask(log, ["Hi"])
        assert answer.error == "HTTP 400: context too long"
        assert len(log.bodies) == 1


@pytest.mark.parametrize(
    "said",
    [
        "This model's maximum context length is 128 tokens. However, you requested 8 output tokens and your prompt",
        "the request exceeds the available context size (128 tokens), try increasing it",
    ],
    ids=["vllm", "llama.cpp"],
)
def test_a_context_shorter_than_the_prompt_is_answered_with_the_remedy(said: str) -> None:
    reply = json.dumps({"error": {"message": said, "code": 400}})
    with serve(lambda handler, *_: handler.send(400, reply)) as log:
        (answer,) = ask(log, ["a"])
    assert answer.error is not None
    assert answer.error.startswith(f"HTTP 400: {said}; start the server with a longer context")
    assert len(log.bodies) == 1, "another attempt would fail in the same way"


@pytest.mark.parametrize(
    ("status", "words"),
    [(401, "FCTUNE_API_KEY"), (403, "FCTUNE_API_KEY"), (404, "--served-model"), (307, "HTTP 307 to http://elsewhere")],
)
def test_an_error_of_every_request_stops_the_evaluation(status: int, words: str) -> None:
    headers = {"Location": "http://elsewhere/"} if status == 307 else {}
    with serve(lambda handler, *_: handler.send(status, "", headers)) as log, pytest.raises(ConfigError, match=words):
        ask(log, ["Hi"] * 40)


@pytest.mark.parametrize("as_date", [False, True])
def test_retry_after_is_respected(as_date: bool) -> None:
    value = email.utils.formatdate(time.time() + 2, usegmt=True) if as_date else "0.6"
    with serve(fail_once(lambda handler: handler.send(429, "", {"Retry-After": value}))) as log:
        (answer,) = ask(log, ["Hi"], retry_policy=RetryPolicy(timeout_s=2, first_wait_s=0.01, max_retry_after_s=3))
        assert answer.error is None
        assert log.times[1] - log.times[0] >= 0.55


def test_a_server_that_requests_too_long_a_wait_is_not_tried_again() -> None:
    with serve(lambda handler, *_: handler.send(429, "later", {"Retry-After": "3600"})) as log:
        (answer,) = ask(log, ["Hi"])
        assert answer.error == "HTTP 429: later"
        assert len(log.bodies) == 1


def test_waits_double_and_are_jittered() -> None:
    retry_policy = RetryPolicy(max_attempts=5, timeout_s=1, first_wait_s=0.08, max_wait_s=0.32)
    with serve(lambda handler, *_: handler.send(503, "")) as log:
        ask(log, ["Hi"], retry_policy=retry_policy)
        gaps = [b - a for a, b in zip(log.times, log.times[1:], strict=False)]
    for gap, longest in zip(gaps, (0.08, 0.16, 0.32, 0.32), strict=True):
        assert longest / 2 <= gap <= longest + 0.1
    assert len({round(gap / longest, 3) for gap, longest in zip(gaps, (0.08, 0.16, 0.32, 0.32), strict=True)}) > 1


def test_requests_stop_once_the_server_is_gone() -> None:
    alive = threading.Event()
    alive.set()

    def behave(handler: Handler, number: int, body: dict[str, Any]) -> None:
        if number >= 20:
            alive.clear()
        say_user(handler, number, body) if alive.is_set() else handler.connection.shutdown(socket.SHUT_RDWR)

    with serve(behave) as log:
        answers = ask(log, [f"word {i}" for i in range(400)])
        assert len(log.bodies) < 20 + 4 * 40
    kept = [answer for answer in answers if answer.error is None]
    dropped = [answer for answer in answers if (answer.error or "").startswith("not sent: 8 requests in a row failed")]
    assert 15 <= len(kept) <= 20
    assert len(dropped) > 300


def test_requests_stop_if_the_server_refuses_the_first_ones() -> None:
    with serve(lambda handler, *_: handler.send(400, "no tools here")) as log:
        answers = ask(log, ["Hi"] * 200)
        assert len(log.bodies) < 40
    assert all("no tools here" in (answer.error or "") for answer in answers)


def test_the_api_key_is_sent_and_never_shown(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login other password wrong\n")
    monkeypatch.setenv("HOME", str(tmp_path))

    def behave(handler: Handler, number: int, body: dict[str, Any]) -> None:
        handler.send(400, json.dumps({"error": {"message": f"you sent {handler.headers['Authorization']}"}}))

    with serve(behave) as log:
        (answer,) = ask(log, ["Hi"], api_key=KEY)
        assert log.headers[0]["Authorization"] == f"Bearer {KEY}"
        assert answer.error == "HTTP 400: you sent Bearer ***"
        assert KEY not in str(ServerEngine(log.url, api_key=KEY).describe())
        ask(log, ["Hi"])
        assert "Authorization" not in log.headers[1]


@pytest.mark.parametrize(
    "encode",
    [
        lambda key: key[3:-3],
        lambda key: key[:12],
        lambda key: base64.b64encode(key.encode()).decode(),
        lambda key: base64.b64encode(f"Bearer {key}".encode()).decode(),
        lambda key: base64.urlsafe_b64encode(f"u:{key}".encode()).decode()[4:],
        lambda key: key.encode().hex(),
    ],
)
def test_a_piece_of_the_api_key_or_an_encoding_of_it_is_never_shown(encode: Any) -> None:
    key = "sk-9vQ2rT7xW4mZ8pL1+/dY6"
    echoed = encode(key)
    with serve(lambda handler, *_: handler.send(400, f"key <{echoed}> is no good")) as log:
        (answer,) = ask(log, ["Hi"], api_key=key)
    assert answer.error is not None
    assert answer.error.startswith("HTTP 400: key <")
    assert answer.error.endswith("> is no good")
    shown = answer.error.removeprefix("HTTP 400: key <").removesuffix("> is no good")
    # What encodes "Bearer " or a user name is no secret.
    assert "***" in shown
    assert not any(echoed[-size:] in shown for size in range(8, len(echoed)))
    assert len(shown.replace("***", "")) < 14


def test_a_missing_server_is_a_config_error() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(ConfigError, match=r"Connection refused.*Is the server up"):
        ServerEngine(f"http://127.0.0.1:{port}", retry_policy=QUICK)


@pytest.mark.parametrize(
    ("models", "words"),
    [
        (b'{"data": [{"id": "a"}, {"id": "b"}]}', "lists a, b. Name it: --served-model"),
        (b'{"data": []}', "lists none"),
        (b"oops", "lists none"),
    ],
)
def test_the_model_must_be_named_unless_the_server_lists_exactly_one(models: bytes, words: str) -> None:
    with serve(say_user, models) as log:
        with pytest.raises(ConfigError, match=words):
            ServerEngine(log.url, retry_policy=QUICK)
        assert ServerEngine(log.url, "b", retry_policy=QUICK).model == "b"


@pytest.mark.parametrize("key", [f"{KEY}\n", f"{KEY} x", f"{KEY}é"])
def test_an_api_key_that_no_header_can_carry_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(ConfigError, match="FCTUNE_API_KEY") as error:
        ServerEngine("http://127.0.0.1:9", api_key=key)
    assert KEY not in str(error.value)


def test_a_redirect_is_not_followed() -> None:
    """The key would go to a server that nobody named."""
    with (
        serve(say_user) as elsewhere,
        serve(lambda handler, *_: handler.send(307, "", {"Location": f"{elsewhere.url}/v1/chat/completions"})) as log,
    ):
        with pytest.raises(ConfigError, match="HTTP 307"):
            ask(log, ["Hi"], api_key=KEY)
        assert not elsewhere.bodies


@pytest.mark.parametrize("is_compressed", [False, True])
def test_an_answer_over_the_size_limit_is_cut_off(is_compressed: bool) -> None:
    body = json.dumps({"text": "x" * 100_000}).encode()
    headers = {"Content-Encoding": "gzip"} if is_compressed else {}
    sent = gzip.compress(body) if is_compressed else body
    with serve(lambda handler, *_: handler.send(200, sent, headers)) as log:
        client = HttpClient(f"{log.url}/v1", retry_policy=RetryPolicy(max_attempts=1), max_body_bytes=10_000)
        with pytest.raises(RequestError, match="more than 10,000 bytes"):
            client.post("/chat/completions", {}, lambda answer: answer)
        client = HttpClient(f"{log.url}/v1", max_body_bytes=200_000)
        assert client.post("/chat/completions", {}, lambda answer: len(answer["text"])) == 100_000


def test_waiting_requests_fail_at_once_when_the_client_is_stopped() -> None:
    with serve(lambda handler, *_: handler.send(503, "")) as log:
        client = HttpClient(f"{log.url}/v1", retry_policy=RetryPolicy(first_wait_s=60, max_wait_s=60))
        threading.Timer(0.2, client.stop).start()
        start = time.monotonic()
        with pytest.raises(RequestError, match="HTTP 503"):
            client.post("/chat/completions", {}, lambda answer: answer)
        assert time.monotonic() - start < 5
        assert len(log.bodies) == 1


def test_many_threads_share_a_client() -> None:
    with serve(say_user) as log:
        client = HttpClient(f"{log.url}/v1")

        def post(number: int) -> str:
            body = {"messages": [{"content": str(number)}]}
            return client.post("/chat/completions", body, lambda answer: answer["choices"][0]["message"]["content"])

        with ThreadPoolExecutor(16) as pool:
            assert list(pool.map(post, range(200))) == [str(number) for number in range(200)]


@pytest.mark.parametrize(
    "url", ["ftp://host", "http://", "https://user:hunter2@host", "localhost:8000", "http://[::1", "http://host:x"]
)
def test_invalid_addresses_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--model: ") as refused:
        ServerEngine(url)
    assert "hunter2" not in str(refused.value)


def test_an_address_is_accepted_with_and_without_its_path() -> None:
    with serve(say_user) as log:
        for tail in ("", "/", "/v1", "/v1/", "/v1/chat/completions"):
            assert ServerEngine(log.url + tail, retry_policy=QUICK).url == f"{log.url}/v1"


def event(text: str, **choice: Any) -> str:
    return json.dumps({"choices": [{"delta": {"content": text}, **choice}]})


ENDINGS = {
    "done": ["[DONE]"],
    "reason": [event("", finish_reason="stop")],
    "usage": ['{"usage": {"completion_tokens": 9}}'],
}


@pytest.mark.parametrize(("ending", "num_tokens"), [(["done"], 3), (["reason"], 3), (["reason", "usage", "done"], 9)])
def test_a_stream_is_timed_to_its_first_token(ending: list[str], num_tokens: int) -> None:
    ending = [piece for name in ending for piece in ENDINGS[name]]

    def behave(handler: Handler, number: int, body: dict[str, Any]) -> None:
        assert body["stream"] is True
        time.sleep(0.1)
        handler.stream(event(""), event("a"), event("b"), event("c"), *ending, pause_s=0.05)

    with serve(behave) as log:
        timing = ServerEngine(log.url).time_answer(Conversation((Message("user", "Hi"),)), 8)
    assert timing.num_tokens == num_tokens
    assert 0.1 <= timing.first_s <= timing.total_s - 0.08


def test_a_server_that_rejects_ignore_eos_is_timed_without_it() -> None:
    def behave(handler: Handler, number: int, body: dict[str, Any]) -> None:
        handler.send(422, "unexpected field") if "ignore_eos" in body else handler.stream(event("a"), "[DONE]")

    with serve(behave) as log:
        engine = ServerEngine(log.url, retry_policy=QUICK)
        for _ in range(2):
            assert engine.time_answer(Conversation((Message("user", "Hi"),)), 8).num_tokens == 1
        assert len(log.bodies) == 3


BROKEN_OFF = {
    '{"error": {"message": "parser crashed", "code": 500}}': "the server sent an error: parser crashed",
    '{"error": "parser crashed"}': "the server sent an error: parser crashed",
    '{"error": {"a": 1}}': "the server sent an error: {'a': 1}",
    event("", finish_reason="abort"): "finish_reason abort",
}
INCOMPLETE = {
    "cut": [event("a")],
    "cut within an event": [event("a"), "{"],
    "empty": [],
    **{words: [event("a"), failed, "[DONE]"] for failed, words in BROKEN_OFF.items()},
}


@pytest.mark.parametrize("pieces", INCOMPLETE.values(), ids=INCOMPLETE.keys())
def test_an_incomplete_stream_is_requested_again(pieces: list[str]) -> None:
    def behave(handler: Handler, number: int, body: dict[str, Any]) -> None:
        handler.stream(*pieces) if number == 0 else handler.stream(event("a"), event("b"), "[DONE]")

    with serve(behave) as log:
        timing = ServerEngine(log.url, retry_policy=QUICK).time_answer(Conversation((Message("user", "Hi"),)), 8)
        assert timing.num_tokens == 2
        assert len(log.bodies) == 2


def test_a_streamed_answer_is_put_together_as_clients_do() -> None:
    """Calls in turn, their arguments in parts, reasoning apart, a limit; then a stream that breaks off at first."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}, {"reasoning": "Hm"}, {"reasoning": "m."}]
    for index, name in enumerate(("f", "g")):
        deltas.append({"tool_calls": [{"index": index, "id": name, "function": {"name": name, "arguments": ""}}]})
        deltas += [{"tool_calls": [{"index": index, "function": {"arguments": part}}]} for part in ('{"a"', ": 1}")]
    events = [json.dumps({"choices": [{"delta": delta}]}) for delta in deltas]
    events.append(json.dumps({"choices": [{"delta": {}, "finish_reason": "length"}]}))
    events.append(json.dumps({"choices": [], "usage": {"completion_tokens": 7}}))

    def behave(handler: Handler, number: int, body: dict[str, Any]) -> None:
        assert body["stream"]
        if number == 1:
            handler.stream(json.dumps({"choices": [{"delta": {"tool_calls": [{"index": "x"}]}}]}), "[DONE]")
        else:
            handler.stream(*events[: 3 if number == 0 else None])

    with serve(behave) as log:
        engine = ServerEngine(log.url, retry_policy=QUICK, is_streamed=True)
        (answer,) = engine.answer([Prompt(Conversation((Message("user", "Hi"),)), 4)])
        assert len(log.bodies) == 3, "a stream without its end, and one with an unreadable call, are asked for again"
    assert answer.error is None
    assert answer.tool_calls is not None
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in answer.tool_calls] == [
        ("f", '{"a": 1}'),
        ("g", '{"a": 1}'),
    ]
    assert answer.reasoning is not None
    assert (answer.reasoning.text, answer.num_tokens, answer.is_cut) == ("Hmm.", 7, True)


@pytest.mark.parametrize(("failed", "words"), BROKEN_OFF.items())
def test_an_answer_that_the_server_breaks_off_within_a_stream_is_not_the_model_s(failed: str, words: str) -> None:
    def behave(handler: Handler, number: int, body: dict[str, Any]) -> None:
        handler.stream(event("Hi"), failed, "[DONE]")

    with serve(behave) as log:
        (answer,) = ask(log, ["Hi"], is_streamed=True)
        assert len(log.bodies) == QUICK.max_attempts
    assert (answer.text, answer.tool_calls) == ("", None)
    assert words in (answer.error or "")


def test_template_switches_are_sent_with_each_request() -> None:
    own = Conversation((Message("user", "Hi"),), template_args={"enable_thinking": True})
    plain = Conversation((Message("user", "Hi"),))
    with serve(say_user) as log:
        for switches in ({"enable_thinking": False, "level": 2}, None):
            engine = ServerEngine(log.url, retry_policy=QUICK, template_args=switches)
            for prompt in (plain, own):
                list(engine.answer([Prompt(prompt, 4)]))
        sent = [body.get("chat_template_kwargs") for body in log.bodies]
        assert engine.describe().get("template_args") is None
    assert sent == [
        {"enable_thinking": False, "level": 2},
        {"enable_thinking": True, "level": 2},
        None,
        {"enable_thinking": True},
    ]


def test_each_sample_of_a_prompt_has_a_seed_of_its_own() -> None:
    with serve(say_user) as log:
        engine = ServerEngine(log.url, sampling=Sampling(1.0, 7), retry_policy=QUICK)
        list(engine.answer(make_prompts([Conversation((Message("user", "Hi"),))] * 4, 8, [0, 1, 2, 3])))
        seeds = sorted(body["seed"] for body in log.bodies)
        assert seeds[0] == 7
        assert len(set(seeds)) == 4
        assert not any("logprobs" in body for body in log.bodies)


def test_token_ids_and_logprobs_are_the_server_s() -> None:
    def behave(handler: Handler, number: int, body: dict[str, Any]) -> None:
        assert body["return_token_ids"]
        assert body["logprobs"]
        choice = {"message": {"content": "Hi"}, "finish_reason": "stop", "token_ids": [5, 2]}
        choice["logprobs"] = {"content": [{"logprob": -0.25}, {"logprob": -1}][: 2 - (number > 0)]}
        answer = {"choices": [choice], "prompt_token_ids": [1, 9], "usage": {"completion_tokens": 2}}
        handler.send(200, json.dumps(answer).encode())

    with serve(behave) as log:
        policy = RetryPolicy(max_attempts=1, timeout_s=5)
        (answer,) = ask(log, ["Hi"], keeps_tokens=True, retry_policy=policy)
        assert answer.tokens == AnswerTokens((1, 9), (5, 2), (-0.25, -1.0))
        assert answer.num_tokens == 2
        (broken,) = ask(log, ["Hi"], keeps_tokens=True, retry_policy=policy)
        assert "2 token ids with 1 log-probabilities" in (broken.error or "")
    with serve(say_user) as log:
        (silent,) = ask(log, ["Hi"], keeps_tokens=True, retry_policy=policy)
        assert "no token ids or no log-probabilities" in (silent.error or "")


def test_a_server_with_another_tokenizer_is_refused(tiny_base: Path) -> None:
    template = ChatTemplate(tiny_base)
    own: list[int] = []

    def behave(handler: Handler, number: int, body: dict[str, Any]) -> None:
        own[:] = own or template.encode_prompt(_to_conversation(body))
        ids = own if number == 0 else [*own[:3], own[3] + 1, *own[4:]]
        choice = {"message": {"content": "A"}, "finish_reason": "length", "token_ids": [5]}
        choice["logprobs"] = {"content": [{"logprob": -1}]}
        handler.send(200, json.dumps({"choices": [choice], "prompt_token_ids": ids}).encode())

    with serve(behave) as log:
        engine = ServerEngine(log.url, retry_policy=QUICK, keeps_tokens=True)
        engine.check_tokens(template)
        with pytest.raises(ConfigError, match=r"tiny has a different tokenizer or chat template from .* number 3 on"):
            engine.check_tokens(template)


def _to_conversation(body: dict[str, Any]) -> Conversation:
    messages = tuple(Message(message["role"], message["content"]) for message in body["messages"])
    return Conversation(messages, tuple(Tool(tool["function"]) for tool in body["tools"]))
