"""A fake Kubernetes API server: it stores objects and never runs a pod.

    python tests/sky/kubernetes_server.py PORT FOLDER

Created objects are written to FOLDER, one JSON file each. The tests validate them against the schemas.
"""

from __future__ import annotations

import json
import sys
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

BORN = "2026-01-01T00:00:00Z"
SINGULAR = {"storageclasses": "StorageClass", "ingresses": "Ingress", "networkpolicies": "NetworkPolicy"}
CAPACITY = {"cpu": "128", "memory": "1600Gi", "pods": "110", "nvidia.com/gpu": "8", "ephemeral-storage": "1000Gi"}
NODE_INFO = (
    *("architecture", "bootID", "containerRuntimeVersion", "kernelVersion", "kubeProxyVersion", "kubeletVersion"),
    *("machineID", "operatingSystem", "osImage", "systemUUID"),
)
VERSION = {"major": "1", "minor": "36", "gitVersion": "v1.36.0", "platform": "linux/amd64", "buildDate": BORN}
VERSION |= dict.fromkeys(("gitCommit", "gitTreeState", "goVersion", "compiler"), "x")

Key = tuple[str, str | None, str, str]  # group and version, namespace, plural, name


class Cluster:
    """Two nodes with 8 H100 in a Nebius node group, two storage classes, and the objects that clients create."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.things, self.lock = folder, dict[Key, dict[str, Any]](), threading.Lock()
        for i in range(2):
            labels = {
                "kubernetes.io/hostname": f"gpu-{i}",
                "nebius.com/node-group-id": "group",
                "skypilot.co/accelerator": "h100",
                "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
                "nvidia.com/gpu.count": "8",
            }
            status = {
                "capacity": CAPACITY,
                "allocatable": CAPACITY,
                "conditions": [{"type": "Ready", "status": "True"}],
                "addresses": [{"type": "InternalIP", "address": f"127.0.0.{20 + i}"}],
                "nodeInfo": dict.fromkeys(NODE_INFO, "x"),
            }
            self.keep(
                "v1", None, "nodes", {"metadata": {"name": f"gpu-{i}", "labels": labels}, "spec": {}, "status": status}
            )
        for name in ("default", "kube-system"):
            self.keep("v1", None, "namespaces", {"metadata": {"name": name}, "status": {"phase": "Active"}})
        for name in ("csi-mounted-fs-path-sc", "compute-csi-default-sc"):
            thing = {"metadata": {"name": name}, "provisioner": "none", "volumeBindingMode": "WaitForFirstConsumer"}
            self.keep("storage.k8s.io/v1", None, "storageclasses", thing)

    def keep(self, group: str, namespace: str | None, plural: str, thing: dict[str, Any]) -> dict[str, Any]:
        """Store an object under its name or a generated one."""
        metadata = thing["metadata"]
        metadata.setdefault("name", metadata.get("generateName", "x-") + uuid.uuid4().hex[:5])
        metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": BORN, "resourceVersion": "1"}
        if namespace is not None:
            metadata["namespace"] = namespace
        thing |= {"apiVersion": group, "kind": SINGULAR.get(plural, thing.get("kind") or plural[:-1].capitalize())}
        self.things[group, namespace, plural, metadata["name"]] = thing
        return thing

    def create(self, group: str, namespace: str | None, plural: str, thing: dict[str, Any]) -> dict[str, Any]:
        """Store an object that a client created, and write it to the folder unchanged."""
        text = json.dumps(thing, indent=1)
        kept = self.keep(group, namespace, plural, thing)
        (self.folder / f"{plural}-{kept['metadata']['name']}.json").write_text(text)
        if plural in ("pods", "persistentvolumeclaims"):
            kept["status"] = {"phase": "Pending"}
        return kept

    def find(self, group: str, namespace: str | None, plural: str, query: dict[str, list[str]]) -> list[dict[str, Any]]:
        """Return the objects of a kind that match the query's selectors."""
        found = [
            thing
            for (of_group, of_namespace, of_plural, _), thing in self.things.items()
            if of_group == group and of_plural == plural and namespace in (None, of_namespace)
        ]
        for selector in ",".join(query.get("labelSelector", [])).split(","):
            key, equals, value = selector.partition("=")
            if equals:
                found = [t for t in found if t["metadata"].get("labels", {}).get(key) == value.lstrip("=")]
        for selector in ",".join(query.get("fieldSelector", [])).split(","):
            key, _, value = selector.partition("=")
            if key == "metadata.name":
                found = [t for t in found if t["metadata"]["name"] == value]
        return found


class Handler(BaseHTTPRequestHandler):
    """Request handler for all verbs of the API."""

    protocol_version = "HTTP/1.1"
    cluster: Cluster

    def log_message(self, *_: Any) -> None:
        """Keep requests out of the tests' output."""

    def answer(self) -> None:
        """Handle a request of any verb."""
        url = urlparse(self.path)
        query = parse_qs(url.query)
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        parts = url.path.strip("/").split("/")
        if url.path == "/version":
            return self.send(200, VERSION)
        if parts in (["api"], ["apis"]):
            return self.send(200, {"kind": "APIVersions", "versions": ["v1"], "groups": []})
        group, rest = ("v1", parts[2:]) if parts[0] == "api" else ("/".join(parts[1:3]), parts[3:])
        namespace = None
        if len(rest) > 2 and rest[0] == "namespaces":
            namespace, rest = rest[1], rest[2:]
        plural, name = rest[0], rest[1] if len(rest) > 1 else None
        with self.cluster.lock:
            return self.act(group, namespace, plural, name, query, body)

    def act(
        self, group: str, namespace: str | None, plural: str, name: str | None, query: dict[str, list[str]], body: Any
    ) -> None:
        """Apply a verb to the cluster."""
        if self.command == "POST" and plural.startswith("selfsubject"):
            return self.send(201, body | {"status": {"allowed": True}})
        if self.command == "POST":
            return self.send(201, self.cluster.create(group, namespace, plural, body))
        if name is None:
            if "watch" in query:
                return self.send(200, None)
            items = self.cluster.find(group, namespace, plural, query)
            return self.send(200, {"kind": "List", "apiVersion": group, "metadata": {}, "items": items})
        thing = self.cluster.things.get((group, namespace, plural, name))
        if thing is None:
            gone = {"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404, "message": self.path}
            return self.send(404, gone)
        if self.command == "DELETE":
            del self.cluster.things[group, namespace, plural, name]
            return self.send(200, {"kind": "Status", "status": "Success"})
        if self.command in ("PATCH", "PUT") and isinstance(body, dict):
            thing["metadata"] |= body.get("metadata", {})
        return self.send(200, thing)

    do_GET = do_POST = do_DELETE = do_PATCH = do_PUT = answer

    def send(self, code: int, value: Any) -> None:
        """Send a JSON response, or an empty one."""
        body = b"" if value is None else json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    Handler.cluster = Cluster(Path(sys.argv[2]))
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
