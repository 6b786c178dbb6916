"""Rollouts through a server: true ids and log-probabilities, versions published atomically, a server that dies."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from fctune.base.errors import ConfigError
from fctune.config.sections.rollouts import ServerConfig
from fctune.data.chat_template import ChatTemplate
from fctune.data.conversation import Conversation
from fctune.engines.engine import Answer, Prompt
from fctune.engines.http_client import RetryPolicy
from fctune.engines.policy_server import PolicyServer, ServerPatience
from fctune.tasks.sampling.task_sets import open_server_engine
from tests.engines.continuations import Continuation, continue_ids
from tests.engines.vllm_stand_in import LIES, VllmStandIn

QUICK = ServerPatience(poll_s=0.05, max_wait_s=20.0, retry=RetryPolicy(2, 20.0, 0.01, 0.02))
PROMPTS = [[1, 5, 9, 30], [1, 5, 9, 30], [7, 8], [100, 3, 44, 2, 90]]
SEEDS = [3, 4, 5, 6]


@pytest.fixture(scope="module")
def model_dir(make_model: Callable[..., Path]) -> Path:
    return make_model("llama", initializer_range=0.2)  # the default makes nearly uniform probabilities


@pytest.fixture(scope="module")
def template(model_dir: Path) -> ChatTemplate:
    return ChatTemplate(model_dir)


@pytest.fixture(scope="module")
def make_adapter(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Write an adapter with random weights."""

    def make(seed: int, rank: int = 4) -> Path:
        path = tmp_path_factory.mktemp("adapter") / f"{seed}-{rank}"
        torch.manual_seed(seed)
        base = AutoModelForCausalLM.from_pretrained(model_dir)
        model = get_peft_model(base, LoraConfig(r=rank, lora_alpha=4 * rank, target_modules=["q_proj", "down_proj"]))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.3)
        model.save_pretrained(str(path))
        return path

    return make


@pytest.fixture
def serve(model_dir: Path) -> Iterator[Callable[..., VllmStandIn]]:
    servers: list[VllmStandIn] = []

    def start(**options: Any) -> VllmStandIn:
        servers.append(VllmStandIn(model_dir, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def connect(template: ChatTemplate, tmp_path: Path) -> Iterator[Callable[..., PolicyServer]]:
    engines: list[PolicyServer] = []

    def make(server: VllmStandIn, **options: Any) -> PolicyServer:
        values = {"patience": QUICK, **options}
        engines.append(PolicyServer(server.url, tmp_path / "published", template, **values))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def ask(engine: PolicyServer, max_new_tokens: int = 6) -> list[Continuation]:
    return continue_ids(engine, PROMPTS, SEEDS, max_new_tokens)


def score(model_dir: Path, adapter: Path | None, prompt: list[int], ids: tuple[int, ...]) -> torch.Tensor:
    """Return the log-probabilities of ids after a prompt, of the merged model."""
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    with torch.no_grad():
        logits = model.eval()(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    return logits.float().log_softmax(-1).gather(1, torch.tensor(ids)[:, None]).squeeze(1)


def test_each_answer_has_the_logprobs_of_the_version_that_wrote_it(
    serve: Callable[..., VllmStandIn],
    connect: Callable[..., PolicyServer],
    make_adapter: Callable[..., Path],
    model_dir: Path,
) -> None:
    server = serve()
    engine = connect(server)
    answered = {}
    for version, adapter in ((0, None), (1, make_adapter(1)), (2, make_adapter(2))):
        if adapter is not None:
            engine.publish(adapter, version)
        assert engine.version == version
        for answer in ask(engine):
            assert answer.error is None
            assert answer.version == version
            expected = score(model_dir, adapter, PROMPTS[answer.index], answer.ids)
            ratios = (expected - torch.tensor(answer.logprobs)).exp()
            assert (ratios - 1).abs().max() < 1e-4
            answered[version, answer.index] = answer.ids
    assert answered[0, 0] != answered[0, 1], "seeds choose the tokens"
    assert len({answered[version, 2] for version in range(3)}) == 3, "each version answers differently"
    assert len(server.adapters) == 1, "older versions are unloaded"
    assert [path.name for path in (Path(server.adapters[name][0]) for name in server.adapters)] == list(server.adapters)


def test_the_servers_own_settings_do_not_change_probabilities(
    serve: Callable[..., VllmStandIn], connect: Callable[..., PolicyServer], template: ChatTemplate
) -> None:
    server = serve()
    ask(connect(server, temperature=0.7))
    body = next(body for path, body in server.requests if path == "/v1/completions")
    neutral = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "temperature": 0.7}
    assert body.items() >= neutral.items()
    assert body["stop_token_ids"] == sorted(template.stop_ids)
    assert body["prompt"] in PROMPTS


def test_requests_in_flight_finish_with_their_version_while_another_is_published(
    serve: Callable[..., VllmStandIn], connect: Callable[..., PolicyServer], make_adapter: Callable[..., Path]
) -> None:
    server = serve()
    engine = connect(server)
    engine.publish(make_adapter(1), 1)
    server.is_answering.clear()
    answers: list[Continuation] = []
    thread = threading.Thread(target=lambda: answers.extend(ask(engine, 2)))
    thread.start()
    while sum(path == "/v1/completions" for path, _ in server.requests) < len(PROMPTS):
        time.sleep(0.01)
    engine.publish(make_adapter(2), 2)
    assert len(server.adapters) == 2, "the old version stays until its requests are done"
    server.is_answering.set()
    thread.join()
    assert {answer.version for answer in answers} == {1}
    assert not any(answer.error for answer in answers)
    assert {answer.version for answer in ask(engine)} == {2}
    assert len(server.adapters) == 1
    assert len(list(engine._adapters.directory.iterdir())) == 1, "files of unloaded versions are deleted"


def test_an_adapter_is_published_complete_and_may_vanish_afterwards(
    serve: Callable[..., VllmStandIn], connect: Callable[..., PolicyServer], make_adapter: Callable[..., Path]
) -> None:
    engine = connect(serve())
    adapter = make_adapter(1)
    engine.publish(adapter, 1)
    (adapter / "adapter_model.safetensors").write_bytes(b"broken")
    assert not any(answer.error for answer in ask(engine))
    with pytest.raises(ConfigError, match="the adapter of version 2 cannot be written"):
        engine.publish(adapter / "missing", 2)
    assert engine.version == 1
    kept = [path.name for path in engine._adapters.directory.iterdir()]
    assert kept == [engine._current.name], "nothing half-written"


def test_a_server_that_dies_is_waited_for_and_gets_the_adapter_again(
    serve: Callable[..., VllmStandIn],
    connect: Callable[..., PolicyServer],
    make_adapter: Callable[..., Path],
    model_dir: Path,
) -> None:
    server, said = serve(), list[str]()
    engine = connect(server, log=said.append)
    adapter = make_adapter(1)
    engine.publish(adapter, 3)
    before = [answer.ids for answer in ask(engine)]
    server.stop()
    threading.Timer(0.5, server.start).start()
    answers = ask(engine)
    assert [answer.ids for answer in answers] == before, "the same answers, by the adapter that was published again"
    assert {answer.version for answer in answers} == {3}
    assert len(said) == 2
    assert "is unavailable (connection failed" in said[0]
    assert "is back after" in said[1]
    assert "with version 3" in said[1]
    # Publishing waits as well.
    server.stop()
    threading.Timer(0.3, server.start).start()
    engine.publish(make_adapter(2), 4)
    assert {answer.version for answer in ask(engine)} == {4}


def test_a_resumed_run_waits_for_a_server_that_is_not_there_yet(
    serve: Callable[..., VllmStandIn], connect: Callable[..., PolicyServer]
) -> None:
    server, said = serve(), list[str]()
    server.stop()
    with pytest.raises(ConfigError, match="no server answers there"):
        connect(server)

    def hear(line: str) -> None:
        said.append(line)
        if len(said) == 1:
            server.start()

    engine = connect(server, is_resumed=True, log=hear)
    assert not any(answer.error for answer in ask(engine))
    assert "is unavailable (connection failed" in said[0]
    assert "is back after" in said[1]


def test_a_server_that_was_restarted_between_two_batches_gets_the_adapter_again(
    serve: Callable[..., VllmStandIn], connect: Callable[..., PolicyServer], make_adapter: Callable[..., Path]
) -> None:
    server = serve()
    engine = connect(server)
    engine.publish(make_adapter(1), 1)
    before = [answer.ids for answer in ask(engine)]
    server.stop()
    server.start()
    assert not server.adapters
    assert [answer.ids for answer in ask(engine)] == before
    assert sum(path == "/v1/load_lora_adapter" for path, _ in server.requests) == 2, "loaded again once, not by each"


def test_a_server_that_does_not_come_back_ends_the_run_in_a_sentence(
    serve: Callable[..., VllmStandIn], connect: Callable[..., PolicyServer]
) -> None:
    server = serve()
    engine = connect(server, patience=ServerPatience(0.02, 0.2, QUICK.retry))
    server.stop()
    with pytest.raises(ConfigError, match=r"unavailable for .* Start the server, and run the same command again to"):
        ask(engine)


def test_an_adapter_that_one_of_several_servers_never_finds_fails_its_requests(
    serve: Callable[..., VllmStandIn], connect: Callable[..., PolicyServer], make_adapter: Callable[..., Path]
) -> None:
    server = serve()
    engine = connect(server)
    engine.publish(make_adapter(1), 1)
    server.fails_with = (404, "The model does not exist")
    found: list[Continuation] = []
    thread = threading.Thread(target=lambda: found.extend(ask(engine)), daemon=True)
    thread.start()
    thread.join(10)
    server.fails_with = (400, "enough")  # ends the thread where requests are repeated for ever
    assert ["does not exist" in str(answer.error) for answer in found] == [True] * len(PROMPTS)


def test_closing_ends_the_threads_that_wait_for_a_lost_server(
    serve: Callable[..., VllmStandIn], connect: Callable[..., PolicyServer]
) -> None:
    server = serve()
    waits, said = ServerPatience(10.0, 20.0, QUICK.retry), threading.Event()
    engine = connect(server, patience=waits, log=lambda line: said.set())
    server.stop()
    errors: list[str] = []

    def generate() -> None:
        try:
            ask(engine)
        except ConfigError as error:
            errors.append(str(error))

    thread = threading.Thread(target=generate)
    thread.start()
    assert said.wait(10)
    engine.close()
    thread.join(5)
    assert not thread.is_alive(), "the process would end only with the wait"
    assert "the run has ended, so it was not waited for" in errors[0]
    server.start()
    assert [answer.error for answer in ask(engine)] == ["the run has ended"] * len(PROMPTS), (
        "a further round of a batch"
    )


def test_an_adapter_that_is_loaded_when_the_run_ends_is_unloaded(
    serve: Callable[..., VllmStandIn],
    connect: Callable[..., PolicyServer],
    make_adapter: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = serve()
    engine = connect(server)
    load = engine._adapters.load

    def load_while_the_run_ends(published: Any) -> str | None:
        error = load(published)
        assert len(server.adapters) == 1
        engine.close()
        return error

    monkeypatch.setattr(engine._adapters, "load", load_while_the_run_ends)
    engine.publish(make_adapter(1), 1)
    assert not server.adapters
    assert list((tmp_path / "published").rglob("adapter_model.safetensors")) == []


def test_callers_on_several_threads_do_not_end_each_others_attempts(
    serve: Callable[..., VllmStandIn], connect: Callable[..., PolicyServer]
) -> None:
    server = serve()
    engine = connect(server, patience=ServerPatience(0.05, 20.0, RetryPolicy(2, 20.0, 0.5, 0.5)))
    assert engine.is_concurrent
    with ThreadPoolExecutor(2) as pool:
        server.is_answering.clear()
        first = pool.submit(continue_ids, engine, PROMPTS[:1], SEEDS[:1], 4)
        while not any(path == "/v1/completions" for path, _ in server.requests):
            time.sleep(0.01)
        server.num_failing = 3  # more than one caller's attempts
        second = pool.submit(continue_ids, engine, PROMPTS[1:2], SEEDS[1:2], 4)
        while server.num_failing == 3:
            time.sleep(0.01)
        server.is_answering.set()
        assert [one.error for done in (first, second) for one in done.result()] == [None, None]


def test_failing_requests_are_repeated_within_bounds(
    serve: Callable[..., VllmStandIn], connect: Callable[..., PolicyServer]
) -> None:
    server = serve()
    engine = connect(server)
    server.num_failing = 3
    assert not any(answer.error for answer in ask(engine))
    server.num_failing = 10**6
    answers = ask(engine)
    assert all("HTTP 500: EngineCore encountered an issue" in str(answer.error) for answer in answers)
    assert 10**6 - server.num_failing <= 6 * len(PROMPTS)
    server.num_failing = 0
    long = continue_ids(engine, [[1] * 2040], [0], 64)
    assert "maximum context length" in str(long[0].error), "not repeated: it is the request's own fault"
    server.fails_with = (401, "Unauthorized")
    with pytest.raises(ConfigError, match=r"Unauthorized. Set FCTUNE_API_KEY"):
        ask(engine)


def test_lies_are_counted_asked_again_and_never_returned(
    serve: Callable[..., VllmStandIn], connect: Callable[..., PolicyServer]
) -> None:
    server, names = serve(), list(LIES)
    engine = connect(server)

    def generate() -> list[Continuation]:
        count = len(names)
        return continue_ids(engine, [PROMPTS[2]] * count, range(count), 2)

    honest, asked = generate(), set[int]()

    def lie_once(body: dict[str, Any]) -> str | None:
        is_first = body["seed"] not in asked
        asked.add(body["seed"])
        return names[body["seed"]] if is_first else None

    server.choose_lie = lie_once
    for name, answer, true in zip(names, generate(), honest, strict=True):
        assert answer.rejected == (LIES[name][0],), name
        assert (answer.error, answer.ids, answer.logprobs) == (None, true.ids, true.logprobs), name
    server.choose_lie = lambda body: names[body["seed"]]
    num_before = len(server.requests)
    for name, answer in zip(names, generate(), strict=True):
        assert answer.rejected == (LIES[name][0],) * QUICK.retry.max_attempts, name
        assert (answer.ids, answer.logprobs) == ((), ())
        assert "unusable answer" in str(answer.error), name
    assert len(server.requests) - num_before == QUICK.retry.max_attempts * len(names), "bounded"


@pytest.mark.parametrize("models", [5, {"data": 5}, {"data": [5, {"id": {}}, {"name": "base"}]}])
def test_a_list_of_models_of_another_form_is_refused_at_the_start(
    serve: Callable[..., VllmStandIn], connect: Callable[..., PolicyServer], models: Any
) -> None:
    server = serve()
    server.list_models = lambda: models  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=r"does not serve base; it lists"):
        connect(server, served_model="base")


@pytest.mark.parametrize("tokens", [5, None, [1, "2"], [float("inf")], [True]])
def test_token_ids_of_another_form_are_refused_at_the_start(
    serve: Callable[..., VllmStandIn], connect: Callable[..., PolicyServer], tokens: Any
) -> None:
    server = serve()
    server._tokenize = lambda body: (200, {"tokens": tokens})  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=r"does not return token ids of a text \(unusable answer"):
        connect(server)


def test_adapters_of_an_earlier_process_of_the_run_are_unloaded(
    serve: Callable[..., VllmStandIn],
    connect: Callable[..., PolicyServer],
    make_adapter: Callable[..., Path],
) -> None:
    server = serve()
    killed, other = connect(server, run_id="runs/a"), connect(server, run_id="runs/b")
    killed.publish(make_adapter(1), 1)
    other.publish(make_adapter(2), 1)
    assert len(server.adapters) == 2
    left = killed._adapters
    assert len(list(left.directory.iterdir())) == 2
    (left.directory / f".{left.prefix}v2-1a2b3c.partial").mkdir()  # it was killed while it wrote
    connect(server, run_id="runs/a")
    assert list(server.adapters) == [other._current.name]
    assert [path.name for path in other._adapters.directory.iterdir()] == [other._current.name]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"takes_adapters": False}, "does not load adapters at run time (HTTP 500: Call to add_lora"),
        ({"updates_at_run_time": False}, "does not load adapters at run time (HTTP 404: Not Found); start vLLM with"),
        ({"max_lora_rank": 2}, "the adapter has rank 4, over the server's limit"),
        ({"is_blind": True}, "the server does not see"),
    ],
    ids=["no_lora", "no_updates", "rank", "blind"],
)
def test_a_refused_adapter_is_one_sentence_with_the_remedy(
    serve: Callable[..., VllmStandIn],
    connect: Callable[..., PolicyServer],
    make_adapter: Callable[..., Path],
    options: dict[str, Any],
    reason: str,
) -> None:
    engine = connect(serve(**options))
    with pytest.raises(ConfigError) as raised:
        engine.publish(make_adapter(1), 1)
    assert reason in str(raised.value)
    assert "\n" not in str(raised.value)
    assert engine.version == 0
    assert not list(engine._adapters.directory.iterdir())


def test_a_wrong_server_is_refused_at_the_start(
    serve: Callable[..., VllmStandIn],
    connect: Callable[..., PolicyServer],
    model_dir: Path,
    tmp_path: Path,
) -> None:
    server = serve(names=["one", "two"])
    with pytest.raises(ConfigError, match=r"lists one, two; name the base with grpo\.server\.served_model"):
        connect(server)
    with pytest.raises(ConfigError, match="does not serve three; it lists one, two"):
        connect(server, served_model="three")
    assert connect(server, served_model="two").describe()["served_model"] == "two"
    with pytest.raises(ConfigError, match=r"has a context of 2,048 tokens, but 4,096 are needed"):
        connect(server, served_model="one", min_positions=4096)
    server.stop()
    with pytest.raises(ConfigError, match=r"no server answers there \(connection failed .*fctune serve BASE --adap"):
        connect(server)


def test_another_tokenizer_is_refused_at_the_start(
    connect: Callable[..., PolicyServer], model_dir: Path, tmp_path: Path
) -> None:
    import shutil

    other = Path(shutil.copytree(model_dir, tmp_path / "other"))
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][: len(tokenizer["model"]["merges"]) // 2]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    server = VllmStandIn(other)
    try:
        with pytest.raises(ConfigError, match=r"has a different tokenizer from .* token ids there and \d+ here"):
            connect(server)
    finally:
        server.stop()


def test_several_servers_share_dialogues_which_stay_where_they_began(
    serve: Callable[..., VllmStandIn], template: ChatTemplate, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    servers = [serve(), serve()]
    urls = ",".join(server.url for server in servers)
    engine = open_server_engine(ServerConfig(url=urls), template, tmp_path)
    engine.publish(make_adapter(1), 1)
    assert [len(server.adapters) for server in servers] == [1, 1]

    def talk(number: int) -> list[Answer]:
        prompts = [Prompt(Conversation((), (), "talk"), 2, number, tuple(ids), 5) for ids in PROMPTS]
        return [answer for prompt in prompts for answer in engine.answer([prompt])]

    with ThreadPoolExecutor(8) as threads:
        answers = [one for of_talk in threads.map(talk, range(8)) for one in of_talk]
    assert {(one.error, one.version) for one in answers} == {(None, 1)}
    asked = [sum(path == "/v1/completions" for path, _ in server.requests) for server in servers]
    assert sum(asked) == 8 * len(PROMPTS)
    with ThreadPoolExecutor(1) as thread:  # as agents ask, whose requests have no thread of their own
        thread.submit(talk, 3).result()
    again = [sum(path == "/v1/completions" for path, _ in server.requests) for server in servers]
    assert sorted(after - before for before, after in zip(asked, again, strict=True)) == [0, len(PROMPTS)]
    assert min(asked) > 0
    assert all(count % len(PROMPTS) == 0 for count in asked), "no dialogue changes its server"
    assert engine.describe()["url"] == urls
    engine.close()
    assert not any(server.adapters for server in servers)


def list_paths(server: VllmStandIn, *ignored: str) -> list[str]:
    return [path for path, _ in server.requests if path not in ignored]


def test_a_server_that_shares_the_gpu_sleeps_between_two_batches_of_answers(
    serve: Callable[..., VllmStandIn], connect: Callable[..., PolicyServer], make_adapter: Callable[..., Path]
) -> None:
    server = serve()
    engine = connect(server, can_sleep=True)
    engine.sleep()
    assert not server.is_awake.is_set()
    engine.wake()
    engine.publish(make_adapter(1), 1)
    answered = ask(engine)
    assert {(answer.version, answer.error) for answer in answered} == {(1, None)}
    engine.sleep()
    engine.wake()
    assert [answer.ids for answer in ask(engine)] == [answer.ids for answer in answered], "with the adapter as it was"
    engine.sleep()
    engine.close()
    assert server.is_awake.is_set()
    assert not server.adapters
    batch = ["/wake_up", "/v1/load_lora_adapter", "/v1/completions", "/sleep?level=1"]
    found = list(dict.fromkeys(list_paths(server, "/tokenize")[2:]))
    assert found == [*batch, "/v1/unload_lora_adapter"]
    assert list_paths(server)[-2:] == ["/wake_up", "/v1/unload_lora_adapter"]


def test_several_servers_that_share_gpus_all_sleep(
    serve: Callable[..., VllmStandIn], template: ChatTemplate, tmp_path: Path
) -> None:
    servers = [serve(), serve()]
    config = ServerConfig(url=",".join(one.url for one in servers), sleeps_while_training=True)
    engine = open_server_engine(config, template, tmp_path)
    engine.sleep()
    assert [one.is_awake.is_set() for one in servers] == [False, False]
    engine.close()
    assert [one.is_awake.is_set() for one in servers] == [True, True]


def test_a_server_that_a_killed_process_left_asleep_is_woken_up_before_its_adapters_are_touched(
    serve: Callable[..., VllmStandIn], connect: Callable[..., PolicyServer], make_adapter: Callable[..., Path]
) -> None:
    server = serve()
    killed = connect(server, can_sleep=True)
    killed.publish(make_adapter(1), 1)
    killed.sleep()
    server.requests.clear()
    engine = connect(server, can_sleep=True, is_resumed=True)
    assert not server.adapters
    assert list_paths(server, "/tokenize") == ["/wake_up", "/v1/unload_lora_adapter"]
    assert not any(answer.error for answer in ask(engine))


def test_a_server_without_sleep_mode_is_refused_at_the_start_with_the_flags_that_it_needs(
    serve: Callable[..., VllmStandIn], connect: Callable[..., PolicyServer]
) -> None:
    with pytest.raises(ConfigError, match=r"/wake_up: HTTP 404.*--enable-sleep-mode and VLLM_SERVER_DEV_MODE=1"):
        connect(serve(has_sleep_mode=False), can_sleep=True)
    assert not any(answer.error for answer in ask(connect(serve(has_sleep_mode=False)))), "nor is it needed otherwise"


def test_a_server_that_fails_to_wake_up_is_waited_for_and_then_named(
    serve: Callable[..., VllmStandIn], connect: Callable[..., PolicyServer]
) -> None:
    server, said = serve(), list[str]()
    engine = connect(server, can_sleep=True, log=said.append, patience=ServerPatience(0.02, 0.5, QUICK.retry))
    engine.sleep()
    server.num_failing_to_wake = 3
    engine.wake()
    assert server.is_awake.is_set()
    assert "is unavailable (/wake_up: HTTP 500: " in said[0]
    assert "out of memory" in said[0]
    assert "is back after" in said[1]
    engine.sleep()
    server.num_failing_to_wake = 10**6
    with pytest.raises(ConfigError, match=rf"{server.url}: unavailable for .*/wake_up: .*out of memory"):
        engine.wake()
    engine.close()
    assert f"POST {server.url}/wake_up does" in said[-1]


def test_a_server_that_was_restarted_while_it_slept_is_waited_for(
    serve: Callable[..., VllmStandIn], connect: Callable[..., PolicyServer], make_adapter: Callable[..., Path]
) -> None:
    server = serve()
    engine = connect(server, can_sleep=True)
    engine.publish(make_adapter(1), 1)
    before = [answer.ids for answer in ask(engine)]
    engine.sleep()
    server.stop()
    threading.Timer(0.3, server.start).start()
    engine.wake()
    assert [answer.ids for answer in ask(engine)] == before, "by the adapter that was loaded again"
