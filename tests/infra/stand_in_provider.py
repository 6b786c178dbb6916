"""Stand-ins for Terraform providers that cannot be downloaded: they answer with a schema, and check nothing else.

Terraform connects to them through TF_REATTACH_PROVIDERS, so ``init`` downloads nothing. They suffice for ``terraform
validate``, and for ``terraform test`` with ``mock_provider``, which plans and applies without the provider's help.
A schema file has the format of ``terraform providers schema -json``.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc

Schema = dict[str, Any]
_NESTING = {"single": 1, "list": 2, "set": 3, "map": 4}


@contextlib.contextmanager
def serve_providers(files: list[Path]) -> Iterator[str]:
    """Serve the providers of schema files; yield the value of ``TF_REATTACH_PROVIDERS``."""
    servers, addresses = [], {}
    try:
        for file in files:
            ((source, schema),) = json.loads(file.read_text(encoding="utf-8"))["provider_schemas"].items()
            server = grpc.server(futures.ThreadPoolExecutor(4))
            server.add_generic_rpc_handlers((_Provider(schema),))
            port = server.add_insecure_port("127.0.0.1:0")
            server.start()
            servers.append(server)
            addresses[source] = {
                "Protocol": "grpc",
                "ProtocolVersion": 6,
                "Pid": os.getpid(),
                "Test": True,  # Terraform must not end this process
                "Addr": {"Network": "tcp", "String": f"127.0.0.1:{port}"},
            }
        yield json.dumps(addresses)
    finally:
        for server in servers:
            server.stop(None)


class _Provider(grpc.GenericRpcHandler):
    """Answers ``GetProviderSchema`` with the schema, and all other calls with an empty message: no problems."""

    def __init__(self, schema: Schema):
        self._schema = _encode_provider(schema)

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        method = details.method  # type: ignore[attr-defined]
        if not method.startswith("/tfplugin6.Provider/"):
            return None
        answer = self._schema if method.endswith("/GetProviderSchema") else b""
        return grpc.unary_unary_rpc_method_handler(lambda request, context: answer)


# Protocol buffers of Terraform's plugin protocol, version 6 (docs/plugin-protocol in its repository). Only these few
# fields are needed, so they are written by hand.


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes(found + bytes([number]))


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value) if value else b""


def _message(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _encode_provider(schema: Schema) -> bytes:
    found = _message(1, _encode_schema(schema.get("provider", {"block": {}})))
    for field, kind in ((2, "resource_schemas"), (3, "data_source_schemas")):
        for name, one in schema.get(kind, {}).items():
            found += _message(field, _message(1, name.encode()) + _message(2, _encode_schema(one)))
    return found


def _encode_schema(schema: Schema) -> bytes:
    attributes = schema["block"].get("attributes", {})
    return _message(2, b"".join(_message(2, _encode_attribute(name, one)) for name, one in attributes.items()))


def _encode_attribute(name: str, attribute: Schema) -> bytes:
    found = _message(1, name.encode())
    if "type" in attribute:
        found += _message(2, json.dumps(attribute["type"]).encode())
    for field, flag in ((4, "required"), (5, "optional"), (6, "computed"), (7, "sensitive"), (11, "write_only")):
        found += _number(field, int(attribute.get(flag, False)))
    if "nested_type" in attribute:
        nested = attribute["nested_type"]
        fields = (_message(1, _encode_attribute(key, one)) for key, one in nested["attributes"].items())
        found += _message(10, b"".join(fields) + _number(3, _NESTING[nested["nesting_mode"]]))
    return found
