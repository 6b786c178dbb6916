"""Minimal W&B server that accepts runs from the wandb client and keeps what it received."""

from __future__ import annotations

import gzip
import json
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(slots=True)
class ReceivedRun:
    """One run as the client uploaded it."""

    config: dict[str, Any] = field(default_factory=dict)
    history: dict[int, dict[str, Any]] = field(default_factory=dict)  # rows by index
    alerts: list[tuple[str, str]] = field(default_factory=list)  # title, text
    num_starts: int = 0


class WandbServer:
    """Server on a local port while the context is open."""

    def __init__(self) -> None:
        self.runs: dict[str, ReceivedRun] = defaultdict(ReceivedRun)
        self.operations: list[str] = []
        handler = type("Handler", (_Handler,), {"wandb": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> WandbServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, operation: str, query: str, given: dict[str, Any]) -> dict[str, Any]:
        """Return the data of the response to a GraphQL request."""
        self.operations.append(operation)
        if operation == "UpsertBucket":
            run = self.runs[given["name"]]
            run.num_starts += given.get("config") is not None
            run.config |= json.loads(given.get("config") or "{}")
            project = {"id": "p", "name": given["project"], "entity": {"id": "e", "name": "someone"}}
            bucket = {"id": "b", "name": given["name"], "displayName": given["name"], "project": project}
            bucket |= {"description": "", "config": json.dumps(run.config), "sweepName": None}
            return {"upsertBucket": {"bucket": bucket | {"historyLineCount": len(run.history)}, "inserted": True}}
        if operation == "NotifyScriptableRunAlert":
            self.runs[given["runName"]].alerts.append((given["title"], given["text"]))
            return {"notifyScriptableRunAlert": {"success": True}}
        if operation == "CreateRunFiles":
            files = [{"name": name, "uploadUrl": f"{self.url}/upload/{name}"} for name in given["files"]]
            return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}
        if operation == "RunResumeStatus":
            return {"model": {"id": "p", "name": given["project"], "bucket": self._status_of(given["name"])}}
        if "viewer" in query:
            return {"viewer": {"id": "u", "entity": "someone", "username": "someone", "flags": "{}"}}
        return {}

    def take(self, run_id: str, files: dict[str, Any]) -> None:
        """Rows of a run's stream of files."""
        stream = files.get("wandb-history.jsonl")
        if stream is not None:
            for place, row in enumerate(stream["content"], stream["offset"]):
                self.runs[run_id].history[place] = json.loads(row)

    def _status_of(self, run_id: str) -> dict[str, Any] | None:
        if run_id not in self.runs or not self.runs[run_id].history:
            return None
        run = self.runs[run_id]
        last = run.history[max(run.history)]
        return {
            "id": "b",
            "name": run_id,
            "historyLineCount": len(run.history),
            "eventsLineCount": 0,
            "logLineCount": 0,
            "historyTail": json.dumps([json.dumps(last)]),
            "eventsTail": "[]",
            "summaryMetrics": json.dumps(last),
            "config": json.dumps(run.config),
            "tags": [],
            "wandbConfig": json.dumps({"t": 1}),
        }


class _Handler(BaseHTTPRequestHandler):
    wandb: WandbServer

    def log_message(self, format: str, *values: object) -> None:
        """Says nothing."""

    def do_GET(self) -> None:
        self._reply({})

    def do_PUT(self) -> None:
        self._read()
        self._reply({})

    def do_POST(self) -> None:
        body = self._read()
        if self.path == "/graphql":
            payload = json.loads(body)
            operation, query = payload.get("operationName") or "", payload["query"]
            self._reply({"data": self.wandb.answer(operation, query, payload.get("variables") or {})})
        else:
            if self.path.endswith("/file_stream"):
                self.wandb.take(self.path.split("/")[-2], json.loads(body).get("files") or {})
            self._reply({"exitcode": None, "limits": {}})

    def _read(self) -> bytes:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

    def _reply(self, answer: dict[str, Any]) -> None:
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
