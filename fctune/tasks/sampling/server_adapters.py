"""This run's adapters on a vLLM server, each under a name that was never used before.

A version is copied to a directory that the server sees, flushed, renamed and loaded. Names are not reused, because a
server keeps cached prefixes by name and path.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fctune.base.errors import ConfigError
from fctune.base.files import flush, staged_directory
from fctune.engines.http_client import HttpClient, RequestError

UNAVAILABLE = (502, 503, 504)
"""HTTP statuses of a server that is starting or ending, or of a proxy without one behind it."""

_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_REMEDY = (
    "start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment, as fctune serve "
    "--adapters does"
)


@dataclass(slots=True, eq=False)
class PublishedAdapter:
    """An adapter on the server; before anything was published, ``name`` is the base's."""

    name: str
    version: int
    path: Path | None = None
    num_requests: int = 0

    def delete_files(self) -> None:
        """Delete its directory, if it has one."""
        if self.path is not None:
            shutil.rmtree(self.path, ignore_errors=True)


class ServerAdapters:
    """Copies, loads and unloads the adapters of a run.

    Args:
        client: Client of the server, which tries each request once: a second attempt would find the name taken.
        url: Its address, for messages.
        publish_dir: Directory that this process and the server see under the same path.
        run_id: Names this run's adapters.

    Attributes:
        directory: ``publish_dir``, absolute.
        prefix: Start of the name of each of the run's adapters.
    """

    def __init__(self, client: HttpClient, url: str, publish_dir: Path, run_id: str):
        self._client, self._url, self.directory = client, url, publish_dir.absolute()
        self.prefix = f"fctune-{hashlib.blake2b(run_id.encode(), digest_size=4).hexdigest()}-"

    def copy(self, policy: Path, version: int) -> PublishedAdapter:
        """Copy an adapter to a directory with a new name, atomically.

        Raises:
            ConfigError: The directory cannot be written.
        """
        path = self.directory / f"{self.prefix}v{version}-{secrets.token_hex(3)}"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with staged_directory(path) as staging:
                for name in _ADAPTER_FILES:
                    shutil.copyfile(policy / name, staging / name)
                    flush(staging / name)
                flush(staging)
            flush(self.directory)
        except OSError as error:
            raise ConfigError(
                f"{self.directory}: the adapter of version {version} cannot be written ({error.strerror or error}). "
                "Pass a directory with free space that trainer and server share."
            ) from None
        return PublishedAdapter(path.name, version, path)

    def load(self, published: PublishedAdapter) -> str | None:
        """Load an adapter; returns the reason if the server is unavailable, else None.

        Raises:
            ConfigError: The server refuses it, or does not see its directory.
        """
        body = {"lora_name": published.name, "lora_path": str(published.path)}
        try:
            # The body is plain text, not JSON.
            self._client.post_text("/v1/load_lora_adapter", body)
        except RequestError as error:
            if error.status is None or error.status in UNAVAILABLE:
                return str(error)
            if "already been loaded" in str(error):
                return None
            raise ConfigError(f"{self._url}: {self._describe_refusal(published, error)}") from None
        return None

    def remove(self, published: PublishedAdapter) -> None:
        """Unload an adapter and delete its directory; nothing for the base."""
        if published.path is not None:
            self._unload(published.name)
            published.delete_files()

    def remove_left(self, names: Iterable[str]) -> None:
        """Unload those of these names that a killed process of this run has left, and delete its directories."""
        for name in names:
            if name.startswith(self.prefix):
                self._unload(name)
        for left in self.directory.glob(f"*{self.prefix}*"):
            shutil.rmtree(left, ignore_errors=True)

    def _unload(self, name: str) -> None:
        with suppress(RequestError):  # a server that has died has unloaded it as well
            self._client.post_text("/v1/unload_lora_adapter", {"lora_name": name})

    def _describe_refusal(self, published: PublishedAdapter, error: RequestError) -> str:
        said, path = str(error), published.path
        assert path is not None
        if "max_lora_rank" in said or ("greater than" in said and "rank" in said.lower()):
            rank = _read_rank(path)
            return (
                f"the adapter has rank {rank}, over the server's limit ({said}). Start vLLM with --max-lora-rank "
                f"{rank} or more, or lower adapter.rank."
            )
        if "No adapter found" in said or "No such file" in said or str(path) in said:
            return (
                f"the server does not see {path} ({said}). Choose a directory that trainer and server share under the "
                "same path."
            )
        if error.status in (404, 405) or ("lora" in said.lower() and "enabl" in said.lower()):
            return f"does not load adapters at run time ({said}); {_REMEDY}."
        return f"rejects the adapter {path} ({said}). Check that it serves the model that is trained."


def _read_rank(adapter_dir: Path) -> int | str:
    try:
        return int(json.loads((adapter_dir / "adapter_config.json").read_text(encoding="utf-8"))["r"])
    except (OSError, ValueError, KeyError, TypeError):
        return "unknown"
