"""A small HTTP server with the part of vLLM's API that rollouts use, on transformers models: ids and logprobs are true.

Messages and statuses are those of vLLM 0.32: ``entrypoints/serve/lora/api_router.py`` and
``entrypoints/openai/models/serving.py``. Asleep, it holds requests until it is woken up (``v1/engine/core.py``), and
loading an adapter, which needs the memory that it gave up, ends the engine.
"""

from __future__ import annotations

import copy
import json
import math
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.ranks import find_port


def _spoil(key: str, change: Callable[[list[Any]], Any]) -> Callable[[dict[str, Any]], Any]:
    """Return a lie that replaces ``token_ids`` or ``token_logprobs`` of a choice by a change of them."""

    def lie(choice: dict[str, Any]) -> None:
        place = choice["logprobs"] if key == "token_logprobs" else choice
        place[key] = change(place[key])

    return lie


def _set_first(key: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return _spoil(key, lambda values: [value, *values[1:]])


def _set(**values: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda choice: choice.update(values)


# What a lying or broken server sends in place of a true choice, and the kind that it must count as. A lie changes the
# choice, or returns another body.
LIES: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "NaN": ("nonfinite_logprob", _set_first("token_logprobs", math.nan)),
    "infinity": ("nonfinite_logprob", _set_first("token_logprobs", math.inf)),
    "minus infinity": ("nonfinite_logprob", _set_first("token_logprobs", -math.inf)),
    "vLLM's minus infinity": ("nonfinite_logprob", _set_first("token_logprobs", -9999.0)),
    "a large negative integer": ("nonfinite_logprob", _set_first("token_logprobs", -(10**400))),
    "positive": ("positive_logprob", _set_first("token_logprobs", 0.5)),
    "a large integer": ("positive_logprob", _set_first("token_logprobs", 10**400)),
    "beyond the vocabulary": ("unknown_token", _set_first("token_ids", 10**6)),
    "beyond 64 bits": ("unknown_token", _set_first("token_ids", 2**64)),
    "negative id": ("unknown_token", _set_first("token_ids", -1)),
    "too long": ("too_long", _set(token_ids=[5] * 300, logprobs={"token_logprobs": [-1.0] * 300})),
    "text as id": ("malformed", _set_first("token_ids", "5")),
    "fraction as id": ("malformed", _set_first("token_ids", 3.5)),
    "infinite id": ("malformed", _set_first("token_ids", math.inf)),
    "true as id": ("malformed", _set_first("token_ids", True)),
    "text as log-probability": ("malformed", _set_first("token_logprobs", "-0.5")),
    "null as log-probability": ("malformed", _set_first("token_logprobs", None)),
    "false as log-probability": ("malformed", _set_first("token_logprobs", False)),
    "one log-probability too few": ("malformed", _spoil("token_logprobs", lambda values: values[1:])),
    "ids as object": ("malformed", _set(token_ids={"0": 5})),
    "log-probabilities as number": ("malformed", _set(logprobs=7)),
    "number as prompt": ("other_prompt", _set(prompt_token_ids=7)),
    "another prompt": ("other_prompt", _set(prompt_token_ids=[1, 2])),
    "aborted": ("unfinished", _set(finish_reason="abort")),
    "list as reason": ("unfinished", _set(finish_reason=["stop"])),
    "number as choices": ("malformed", lambda choice: {"choices": 5}),
    "text as choice": ("malformed", lambda choice: {"choices": ["stop"]}),
    "list as body": ("malformed", lambda choice: [choice]),
    "null as body": ("malformed", lambda choice: "null"),
    "a web page": ("malformed", lambda choice: "<html>"),
    "nested a million times": ("malformed", lambda choice: "[" * 10**6),
}


class VllmStandIn:
    """Serves until ``stop``; ``start`` begins again on the same port, with no adapter loaded."""

    def __init__(self, model_dir: Path, **options: Any):
        self.model_dir = model_dir
        self.port = options.pop("port", None) or find_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.takes_adapters = options.pop("takes_adapters", True)
        self.updates_at_run_time = options.pop("updates_at_run_time", True)
        self.max_lora_rank = options.pop("max_lora_rank", 16)
        self.max_model_len = options.pop("max_model_len", 2048)
        self.max_logprobs = options.pop("max_logprobs", 20)
        self.is_blind = options.pop("is_blind", False)
        self.has_sleep_mode = options.pop("has_sleep_mode", True)
        self.names = options.pop("names", ["base"])
        assert not options
        self.tokenizer = AutoTokenizer.from_pretrained(model_dir)
        self.base = AutoModelForCausalLM.from_pretrained(model_dir).eval()
        self.adapters: dict[str, tuple[str, Any]] = {}
        self.requests: list[tuple[str, Any]] = []
        self.delay_s = 0.0
        self.is_answering = threading.Event()  # cleared, requests wait
        self.is_answering.set()
        self.num_failing = self.num_failing_to_wake = 0
        self.is_awake = threading.Event()
        self.fails_with: tuple[int, str] | None = None
        # Spoils answers by a name of LIES; it gets the request, and None leaves an answer true.
        self.choose_lie: Callable[[dict[str, Any]], str | None] = lambda body: None
        # Changes the log-probabilities of a prompt before they are sent.
        self.spoil_scores: Callable[[list[Any]], Any] = lambda scores: scores
        self.lock = threading.Lock()
        self._server: ThreadingHTTPServer | None = None
        self.start()

    def start(self) -> None:
        self.adapters = {}
        self.is_awake.set()
        handler = type("Handler", (_Handler,), {"app": self})
        self._server = _Server(("127.0.0.1", self.port), handler)
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        with self.lock:
            self.requests.append((path, body))
            if path == "/v1/completions" and self.num_failing > 0:
                self.num_failing -= 1
                return 500, {"error": {"message": "EngineCore encountered an issue."}}
            if path == "/v1/completions" and self.fails_with is not None:
                return self.fails_with[0], {"error": {"message": self.fails_with[1]}}
        routes = {"/v1/completions": self._complete, "/tokenize": self._tokenize, "/detokenize": self._detokenize}
        if self.has_sleep_mode:
            routes |= {"/sleep?level=1": self._sleep, "/wake_up": self._wake}
        if self.updates_at_run_time:
            routes |= {"/v1/load_lora_adapter": self._load, "/v1/unload_lora_adapter": self._unload}
        return routes[path](body) if path in routes else (404, {"detail": "Not Found"})

    def list_models(self) -> Any:
        rows = [{"id": name, "root": str(self.model_dir), "parent": None} for name in self.names]
        rows = [{**row, "max_model_len": self.max_model_len} for row in rows]
        rows += [{"id": name, "root": path, "parent": self.names[0]} for name, (path, _) in self.adapters.items()]
        return {"object": "list", "data": rows}

    def _tokenize(self, body: dict[str, Any]) -> tuple[int, Any]:
        if "messages" in body:
            ids = self._render(body)
        else:
            ids = self.tokenizer.encode(body["prompt"], add_special_tokens=body["add_special_tokens"])
        return 200, {"count": len(ids), "max_model_len": self.max_model_len, "tokens": ids}

    def _render(self, body: dict[str, Any]) -> list[int]:
        messages = json.loads(json.dumps(body["messages"]))
        for message in messages:
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        ids: list[int] = self.tokenizer.apply_chat_template(
            messages,
            tools=body.get("tools"),
            add_generation_prompt=body["add_generation_prompt"],
            return_dict=False,
            **body.get("chat_template_kwargs", {}),
        )
        return ids

    def _detokenize(self, body: dict[str, Any]) -> tuple[int, Any]:
        return 200, {"prompt": self.tokenizer.decode(body["tokens"])}

    def _sleep(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.is_awake.clear()
        return 200, {"status": "sleeping", "level": 1}

    def _wake(self, body: dict[str, Any]) -> tuple[int, Any]:
        with self.lock:
            self.num_failing_to_wake -= 1
            if self.num_failing_to_wake >= 0:
                return 500, {"error": {"message": "CUDA Error: out of memory"}}
        self.is_awake.set()
        return 200, {"status": "awake", "tags": None}

    def _load(self, body: dict[str, Any]) -> tuple[int, Any]:
        if not self.is_awake.is_set():
            return 500, {"error": {"message": "EngineCore encountered an issue."}}
        name, path = body["lora_name"], Path(body["lora_path"])
        if name in self.adapters:
            return 400, {"error": {"message": f"The lora adapter '{name}' has already been loaded. If you want ..."}}
        if not self.takes_adapters:
            said = "Call to add_lora method failed: LoRA is not enabled. Use --enable-lora to enable LoRA."
            return 500, {"error": {"message": said, "type": "InternalServerError"}}
        if self.is_blind or not path.is_dir():
            return 404, {"error": {"message": f"Loading lora {name} failed: No adapter found for {path}"}}
        rank = json.loads((path / "adapter_config.json").read_text())["r"]
        if rank > self.max_lora_rank:
            said = f"Call to add_lora method failed: LoRA rank {rank} is greater than max_lora_rank"
            return 500, {"error": {"message": f"{said} {self.max_lora_rank}.", "type": "InternalServerError"}}
        # Not from_pretrained, which replaces methods of all models meanwhile: two threads at once would leave them so.
        loaded = PeftModel.from_pretrained(copy.deepcopy(self.base), str(path)).eval()
        with self.lock:
            self.adapters[name] = (str(path), loaded)
        return 200, f"Success: LoRA adapter '{name}' added successfully."

    def _unload(self, body: dict[str, Any]) -> tuple[int, Any]:
        with self.lock:
            found = self.adapters.pop(body["lora_name"], None)
        if found is None:
            return 404, {"error": {"message": f"The lora adapter '{body['lora_name']}' cannot be found."}}
        return 200, f"Success: LoRA adapter '{body['lora_name']}' removed successfully."

    def _complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        name, prompt = body["model"], body["prompt"]
        with self.lock:
            model = self.base if name in self.names else self.adapters.get(name, (None, None))[1]
        if model is None:
            return 404, {"error": {"message": f"The model `{name}` does not exist. Valid aliases: base."}}
        if len(prompt) + body["max_tokens"] > self.max_model_len:
            said = f"This model's maximum context length is {self.max_model_len} tokens."
            return 400, {"error": {"message": said}}
        time.sleep(self.delay_s)
        self.is_answering.wait()
        self.is_awake.wait()
        if "prompt_logprobs" in body:
            if (num := body["prompt_logprobs"]) > self.max_logprobs:
                said = f"Requested prompt logprobs of {num}, which is greater than max allowed: {self.max_logprobs}"
                return 400, {"error": {"message": said}}
            scores = self.spoil_scores(self._score(model, prompt, num))
            return 200, {"choices": [{"index": 0, "text": "", "prompt_logprobs": scores}]}
        ids, logprobs, reason = self._sample(model, body)
        choice = {"index": 0, "text": self.tokenizer.decode(ids), "finish_reason": reason}
        choice |= {"token_ids": ids, "prompt_token_ids": prompt, "logprobs": {"token_logprobs": logprobs}}
        if (lie := self.choose_lie(body)) is not None and (spoiled := LIES[lie][1](choice)) is not None:
            return 200, spoiled
        return 200, {"id": "cmpl-1", "object": "text_completion", "model": name, "choices": [choice]}

    def _score(self, model: Any, prompt: list[int], num: int) -> list[Any]:
        """Return the log-probability of each token of a prompt, and those of the most likely tokens at its position."""
        with torch.no_grad(), self.lock:
            logprobs = model(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
        scores: list[Any] = [None]
        for at, token in enumerate(prompt[1:]):
            named = dict.fromkeys([token, *logprobs[at].topk(num).indices.tolist()])
            ranks = {i: int((logprobs[at] > logprobs[at, i]).sum()) + 1 for i in named}
            scores.append({str(i): {"logprob": float(logprobs[at, i]), "rank": ranks[i]} for i in named})
        return scores

    def _sample(self, model: Any, body: dict[str, Any]) -> tuple[list[int], list[float], str]:
        generator = torch.Generator().manual_seed(body["seed"])
        ids: list[int] = []
        logprobs: list[float] = []
        past, new = None, body["prompt"]
        for _ in range(body["max_tokens"]):
            with torch.no_grad(), self.lock:
                output = model(torch.tensor([new]), past_key_values=past, use_cache=True)
            logits, past = output.logits[0, -1].float(), output.past_key_values
            probabilities = (logits / body["temperature"]).softmax(-1)
            token = int(torch.multinomial(probabilities, 1, generator=generator))
            ids.append(token)
            new = [token]
            logprobs.append(float(logits.log_softmax(-1)[token]))
            if token in body["stop_token_ids"]:
                return ids, logprobs, "stop"
        return ids, logprobs, "length"


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a killed client
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    app: VllmStandIn

    def do_GET(self) -> None:
        if self.path == "/is_sleeping" and self.app.has_sleep_mode:
            self._send(200, {"is_sleeping": not self.app.is_awake.is_set()})
        else:
            self._send(200, self.app.list_models()) if self.path == "/v1/models" else self._send(404, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._send(*self.app.answer(self.path, body))

    def _send(self, status: int, content: Any) -> None:
        sent = (content if isinstance(content, str) else json.dumps(content)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent)

    def log_message(self, *arguments: Any) -> None: ...
