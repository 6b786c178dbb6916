"""A local server with the part of the hub's API that the real client uses for downloads and commits."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlparse

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class HubServer:
    """Repositories by ``models/OWNER/NAME`` or ``datasets/...``, and a record of all requests."""

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)  # readable with the token "may-read"
    private: set[str] = field(default_factory=set)
    cut: set[str] = field(default_factory=set)  # files whose first download is cut off half way
    sent: Counter[str] = field(default_factory=Counter)  # bytes sent of each file
    created: list[dict[str, Any]] = field(default_factory=list)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    tokens: set[str] = field(default_factory=set)
    refusal: tuple[int, str, str] | None = None  # of commits: status, error code, message
    commit: str = COMMIT  # the newest commit of every repository
    url: str = ""


@contextmanager
def serve_hub(hub: HubServer) -> Iterator[HubServer]:
    """Serve on a free local port, stored in ``hub.url``."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            """Keep requests out of the tests' output."""

        def do_HEAD(self) -> None:
            self._file(is_head=True)

        def do_GET(self) -> None:
            path = unquote(urlparse(self.path).path)
            if not path.startswith("/api/"):
                return self._file(is_head=False)
            name = "/".join(path.split("/")[2:5])
            if refusal := self._refusal(name):
                return self._send(*refusal)
            if path.endswith("/auth-check"):
                return self._send(200, b"{}")
            if "/tree/" in path:
                files = hub.repositories[name]
                entries = [
                    {"type": "file", "path": file, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for file, data in files.items()
                ]
                return self._json(entries)
            return self._json(
                {"id": name.partition("/")[2], "sha": hub.commit, "siblings": [], "private": name in hub.private}
            )

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            hub.tokens.add(self.headers.get("Authorization", ""))
            path = unquote(urlparse(self.path).path)
            if self.headers.get("Authorization") != "Bearer may-write":
                return self._send(401, b'{"error": "Invalid token"}')
            if path == "/api/repos/create":
                requested = json.loads(body)
                hub.created.append(requested)
                return self._json({"url": f"{hub.url}/{requested['organization']}/{requested['name']}"})
            if "/preupload/" in path:
                files = [file["path"] for file in json.loads(body)["files"]]
                modes = [{"path": file, "uploadMode": "regular", "shouldIgnore": False} for file in files]
                return self._json({"files": modes})
            if "/commit/" in path and hub.refusal is not None:
                status, code, message = hub.refusal
                return self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": message})
            if "/commit/" in path:
                items = [json.loads(line) for line in body.splitlines()]
                name = "/".join(path.split("/")[3:5])
                hub.commits[name] = {
                    item["value"]["path"]: base64.b64decode(item["value"]["content"])
                    for item in items
                    if item["key"] == "file"
                }
                return self._json({"commitUrl": f"{hub.url}/{name}/commit/{COMMIT}", "commitOid": COMMIT})
            return self._json({})

        def _refusal(self, name: str) -> tuple[int, bytes, dict[str, str]] | None:
            if name not in hub.repositories:
                return 404, b"{}", {"X-Error-Code": "RepoNotFound"}
            if name in hub.gated and self.headers.get("Authorization") != "Bearer may-read":
                return 403, b"{}", {"X-Error-Code": "GatedRepo"}
            return None

        def _file(self, is_head: bool) -> None:
            parts = unquote(urlparse(self.path).path).strip("/").split("/")
            parts = parts if parts[0] == "datasets" else ["models", *parts]
            name, file = "/".join(parts[:3]), "/".join(parts[5:])
            if refusal := self._refusal(name):
                return self._send(*refusal)
            data = hub.repositories[name].get(file)
            if data is None:
                return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": parts[4]}
            start = 0
            if (requested := self.headers.get("Range")) and not is_head:
                start = int(requested.removeprefix("bytes=").split("-")[0])
                headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            if is_head:
                return self._send(200, b"", headers, len(data))
            if file in hub.cut:
                hub.cut.discard(file)
                half = data[start : len(data) // 2]
                hub.sent[file] += len(half)
                self._send(200, half, headers, len(data))
                self.close_connection = True
                return None
            hub.sent[file] += len(data) - start
            return self._send(206 if start else 200, data[start:], headers)

        def _json(self, value: Any) -> None:
            self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def _send(
            self, code: int, body: bytes, headers: dict[str, str] | None = None, length: int | None = None
        ) -> None:
            self.send_response(code)
            for key, value in (headers or {}).items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(body) if length is None else length))
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
