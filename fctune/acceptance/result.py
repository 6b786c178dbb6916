"""The result of a run as a document: ``acceptance.json``, whose schema is ``result.schema.json`` beside this file."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema

from fctune.acceptance.config import AcceptanceConfig
from fctune.acceptance.judge import Check, Samples, decide
from fctune.acceptance.metrics import METRICS
from fctune.acceptance.traffic import list_bandwidths
from fctune.errors import ConfigError
from fctune.files import write_atomically

VERSION = 1
NAME = "acceptance.json"


def make_document(
    config: AcceptanceConfig,
    checks: Sequence[Check],
    samples: Samples,
    *,
    world_size: int,
    ranks_per_node: int,
    started_at: float,
    seconds: float,
) -> dict[str, Any]:
    """All that is known of a run; the same whatever the order in which ranks gave their samples."""
    verdict, reason = decide(checks)
    made = {
        "version": VERSION,
        "verdict": verdict,
        "reason": reason,
        "profile": config.profile,
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started_at)),
        "seconds": round(seconds, 3),
        "world_size": world_size,
        "ranks_per_node": ranks_per_node,
        "checks": [_describe(check) for check in checks],
        "bandwidths": list_bandwidths(samples, ranks_per_node, world_size),
        "config": config.to_dict(),
        "samples": {
            phase: {str(rank): by_rank[rank] for rank in sorted(by_rank)} for phase, by_rank in samples.items()
        },
    }
    plain: dict[str, Any] = json.loads(json.dumps(made, allow_nan=False))  # as whoever reads the file has it
    return plain


def write_document(document: Mapping[str, Any], folder: Path) -> Path:
    """Write it whole or not at all; its path.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / NAME, json.dumps(document, indent=1, allow_nan=False) + "\n")
    # As every run says why it ended, for launch scripts.
    ended = {"code": 0 if document["verdict"] == "PASS" else 1, "reason": document["reason"], "step": 0}
    write_atomically(folder / "exit.json", json.dumps(ended | {"checkpoint": None}, indent=2) + "\n")
    return folder / NAME


def read_document(path: str | Path) -> dict[str, Any]:
    """The document of a file, or of a run's folder.

    Raises:
        ConfigError: no such file, not JSON, or not in the schema's form.
    """
    path = Path(path)
    file = path / NAME if path.is_dir() else path
    try:
        document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror}). A run writes it to its output_dir.") from None
    except ValueError as error:
        raise ConfigError(f"{file}: not JSON ({error}).") from None
    version = document.get("version") if isinstance(document, dict) else None
    if isinstance(version, int) and version != VERSION:
        raise ConfigError(f"{file}: version {version} of the document; this fctune reads version {VERSION}.")
    problem = next(iter(jsonschema.Draft202012Validator(read_schema()).iter_errors(document)), None)
    if problem is not None:
        where = "/".join(map(str, problem.absolute_path)) or "the document"
        raise ConfigError(f"{file}: not the result of an acceptance run: {where}: {problem.message[:200]}.")
    return document


def read_schema() -> dict[str, Any]:
    """The JSON schema of the document."""
    schema: dict[str, Any] = json.loads((files("fctune.acceptance") / "result.schema.json").read_text("utf-8"))
    return schema


def _describe(check: Check) -> dict[str, Any]:
    figures = []
    for figure in check.figures:
        metric = METRICS[figure.name]
        threshold = None if figure.threshold is None else asdict(figure.threshold)
        figures.append(
            {
                "name": figure.name,
                "value": figure.value,
                "unit": metric.unit,
                "better": metric.better,
                "says": metric.says,
                "status": figure.status,
                "threshold": threshold,
            }
        )
    return {
        "name": check.name,
        "status": check.status,
        "required": check.required,
        "reason": check.reason,
        "figures": figures,
        "culprits": [asdict(culprit) | {"text": str(culprit)} for culprit in check.culprits],
        "next": check.next_step,
    }
