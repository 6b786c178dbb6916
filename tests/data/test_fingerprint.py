"""Fingerprints change with every input that matters, and cached digests of files are never stale."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import fields, make_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from fctune.config.fields import KEEPS_PREPARED, Field, list_fields
from fctune.config.sections.data import AugmentConfig, DataConfig, RedactConfig, ReplayConfig, SourceConfig
from fctune.data.fingerprint import FileDigests, fingerprint_inputs, fingerprint_source


def content_digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


def open_cache(path: Path) -> FileDigests:
    """Digests that are cached for files of any age, so that tests need not wait."""
    return FileDigests(path, settled_ns=-(10**12))


def test_a_cached_digest_is_used_without_reading_the_file(tmp_path: Path) -> None:
    rows, cache = tmp_path / "rows.jsonl", tmp_path / "cache.json"
    rows.write_text("one\n")
    first = open_cache(cache)
    assert first.digest(rows) == content_digest(rows)
    first.save()
    entries = json.loads(cache.read_text())
    entries[str(rows)][-1] = "as cached"
    cache.write_text(json.dumps(entries))
    assert open_cache(cache).digest(rows) == "as cached"


def test_a_change_that_restores_time_and_size_is_detected(tmp_path: Path) -> None:
    rows, cache = tmp_path / "rows.jsonl", tmp_path / "cache.json"
    rows.write_text("one\n")
    digests = open_cache(cache)
    before, stamp = digests.digest(rows), rows.stat().st_mtime_ns
    digests.save()
    rows.write_text("two\n")
    os.utime(rows, ns=(stamp, stamp))
    assert open_cache(cache).digest(rows) == content_digest(rows) != before


def test_a_cached_digest_holds_where_the_disk_is_mounted_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, other, cache = tmp_path / "a" / "rows.jsonl", tmp_path / "b" / "rows.jsonl", tmp_path / "cache.json"
    for folder in (rows.parent, other.parent):
        folder.mkdir()
    rows.write_text("one\n")
    other.hardlink_to(rows)  # one file under two paths, as under two mount points
    digests = open_cache(cache)
    before = digests.digest(rows)
    digests.save()
    monkeypatch.setattr(hashlib, "file_digest", lambda *_: pytest.fail("the file was read again"))
    found = open_cache(cache)
    assert found.has(other)
    assert found.digest(other) == before
    monkeypatch.undo()
    other.unlink()
    other.write_text("two\n")
    assert not open_cache(cache).has(other)
    assert open_cache(cache).digest(other) == content_digest(other) != before


def test_the_digest_of_a_file_that_just_changed_is_not_cached(tmp_path: Path) -> None:
    rows, cache = tmp_path / "rows.jsonl", tmp_path / "cache.json"
    rows.write_text("one\n")
    digests = FileDigests(cache)
    digests.digest(rows)
    digests.save()
    assert not cache.exists()


@pytest.mark.parametrize("content", [b"", b"{", b"[1, 2]", b'{"a": []}', b"\xff\xfe"])
def test_a_damaged_cache_is_ignored(content: bytes, tmp_path: Path) -> None:
    rows, cache = tmp_path / "rows.jsonl", tmp_path / "cache.json"
    rows.write_text("one\n")
    cache.write_bytes(content)
    digests = open_cache(cache)
    assert digests.digest(rows) == content_digest(rows)
    digests.save()
    assert open_cache(cache).digest(rows) == content_digest(rows)


def test_a_cache_that_cannot_be_written_is_ignored(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("one\n")
    digests = open_cache(tmp_path / "missing" / "cache.json")
    assert digests.digest(rows) == content_digest(rows)
    digests.save()


# A different valid value for every data key. A key that is added to DataConfig needs one here.
CHANGES: dict[str, Any] = {
    "sources": [SourceConfig(path="synthetic:train:9:1")],
    "validation_share": 0.5,
    "max_samples": 3,
    "augment": AugmentConfig(ask=0.5),
    "replay": ReplayConfig(sources=[SourceConfig(path="synthetic:pretrain:9:1")]),
    "seq_len": 256,
    "pairs": True,
    "packed": False,
    "pad_to": "seq_len",
    "train_on": "calls",
    "train_reasoning": "last",
    "call_weight": 2.0,
    "on_invalid": "skip",
    "max_invalid_share": "50%",
    "overlong": "drop",
    "parallel_calls": "split",
    "content_with_calls": "drop",
    "special_tokens_in_content": "escape",
    "reasoning": "drop",
    "thinking": "rows",
    "secrets": "ignore",
    "redact": RedactConfig(kinds=["secrets", "emails"]),
    "prepared_dir": "elsewhere",
}


@pytest.mark.parametrize("key", list_fields(DataConfig), ids=lambda key: key.name)
def test_every_data_key_changes_the_fingerprint_unless_it_is_annotated(key: Field, tiny_base: Path) -> None:
    config = DataConfig(sources=[SourceConfig(path="synthetic:train:9:0")], secrets="redact")
    changed = replace(config, **{key.name: CHANGES[key.name]})
    assert changed != config
    is_same = fingerprint_inputs(changed, tiny_base) == fingerprint_inputs(config, tiny_base)
    assert is_same is (key.change is KEEPS_PREPARED)


@pytest.mark.parametrize(
    "change",
    [
        {"weight": 2.0},
        {"format": "openai"},
        {"path": "synthetic:train:9:1"},
        {"columns": {"a": "ignore"}},
        {"fold": "always"},
        {"where": "score > 0"},
        {"failed": "keep"},
        {"wrong_turns": "train"},
    ],
)
def test_every_key_of_a_source_changes_the_fingerprint(change: dict[str, Any], tiny_base: Path) -> None:
    keys = {"path", "format", "weight", "columns", "fold", "where", "failed", "wrong_turns"}
    assert {field.name for field in fields(SourceConfig)} == keys
    source = SourceConfig(path="synthetic:train:9:0")
    names = {fingerprint_inputs(DataConfig(sources=[one]), tiny_base)[0] for one in (source, replace(source, **change))}
    assert len(names) == 2


SNAPSHOT = f"datasets--some--rows/snapshots/{'0123456789' * 4}"


@pytest.mark.parametrize("section", ["sources", "replay"])
def test_the_same_rows_elsewhere_are_the_same_input(section: str, tiny_base: Path, tmp_path: Path) -> None:
    def name(*paths: str | Path) -> str:
        rows = [SourceConfig(path=str(path)) for path in paths]
        own = [SourceConfig(path="synthetic:train:9:0")]
        config = (
            DataConfig(sources=rows)
            if section == "sources"
            else DataConfig(sources=own, replay=ReplayConfig(sources=rows))
        )
        return fingerprint_inputs(config, tiny_base)[0]

    one, other = tmp_path / "mnt" / "shared", tmp_path / "shared"
    for folder in (one, other):
        (folder / "more").mkdir(parents=True)
        (folder / "rows.jsonl").write_text('{"messages": []}\n')
        (folder / "more" / "rows.jsonl").write_text('{"messages": []}\n')
    assert name(one / "rows.jsonl") == name(other / "rows.jsonl")
    assert name(one) == name(other)
    assert name(one / "rows.jsonl", one / "more") == name(other / "rows.jsonl", other / "more")
    assert name(one / "rows.jsonl", one / "rows.jsonl") == name(other / "rows.jsonl", other / "rows.jsonl")
    assert name(one / "rows.jsonl", one / "rows.jsonl") != name(one / "rows.jsonl", one / "more" / "rows.jsonl"), (
        "rows of one source share their tools"
    )
    (other / "rows.jsonl").rename(other / "other.jsonl")
    assert name(one / "rows.jsonl") != name(other / "other.jsonl"), "a name tells the format"
    assert name(f"hf:/mnt/hub/{SNAPSHOT}:small") == name(f"hf:/shared/me/hub/{SNAPSHOT}:small")
    others = (f"{SNAPSHOT[:-1]}a:small", f"{SNAPSHOT}:large", SNAPSHOT, SNAPSHOT.replace("some", "other") + ":small")
    names = {name(f"hf:/mnt/hub/{path}") for path in (f"{SNAPSHOT}:small", *others)}
    assert len(names | {name("hf:/mnt/some/rows"), name("hf:/shared/some/rows")}) == 7, "nothing else tells a content"


def test_every_key_of_augment_and_replay_changes_the_fingerprint(tiny_base: Path) -> None:
    source = SourceConfig(path="synthetic:train:9:0")
    augment, replay = AugmentConfig(ask=0.5), ReplayConfig(sources=[SourceConfig(path="synthetic:pretrain:9:1")])
    changes = {field.name: 0.25 for field in fields(AugmentConfig)} | {"max_tools": 4, "seed": 1}
    configs = [DataConfig(sources=[source], augment=replace(augment, **{key: value})) for key, value in changes.items()]
    for other in (replace(replay, share="20%"), replace(replay, sources=[source]), replay):
        configs.append(DataConfig(sources=[source], augment=augment, replay=other))
    names = {fingerprint_inputs(config, tiny_base)[0] for config in configs}
    assert len(names) == len(configs)
    same = [DataConfig(sources=[source], augment=AugmentConfig(ask=share)) for share in ("50%", 0.5, "0.5")]
    assert len({fingerprint_inputs(config, tiny_base)[0] for config in same}) == 1


def test_a_config_without_augment_and_replay_keeps_the_inputs_that_it_had(tiny_base: Path) -> None:
    _, inputs = fingerprint_inputs(DataConfig(sources=[SourceConfig(path="synthetic:train:9:0")]), tiny_base)
    assert not {"augment", "replay"} & inputs.keys()


def test_template_switches_change_the_fingerprint(tiny_base: Path) -> None:
    config = DataConfig(sources=[SourceConfig(path="synthetic:train:9:0")])
    switches: list[dict[str, Any] | None] = [None, {}, {"enable_thinking": True}, {"enable_thinking": False}]
    names = [fingerprint_inputs(config, tiny_base, template_args=given)[0] for given in switches]
    assert names[0] == names[1]
    assert len(set(names)) == 3


def test_a_key_added_to_the_data_config_counts_by_default(tiny_base: Path) -> None:
    extended = make_dataclass("Extended", [("new_key", int, 1)], bases=(DataConfig,), kw_only=True)
    sources = [SourceConfig(path="synthetic:train:9:0")]
    names = {fingerprint_inputs(extended(sources=sources, new_key=value), tiny_base)[0] for value in (1, 2)}
    assert len(names) == 2


def test_the_contents_of_rows_and_tokenizer_change_the_fingerprint(tiny_base: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"messages": []}\n')
    config = DataConfig(sources=[SourceConfig(path=str(rows))])
    names = {fingerprint_inputs(config, tiny_base)[0]}
    model = tmp_path / "model"
    model.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).write_text((tiny_base / name).read_text() + " ")
        names.add(fingerprint_inputs(config, model)[0])
    (model / "chat_template.jinja").write_text("{{ messages }}")
    names.add(fingerprint_inputs(config, model)[0])
    (model / "additional_chat_templates").mkdir()
    for text in ("{{ tools }}", "{{ tools }}\n"):
        (model / "additional_chat_templates" / "tool_use.jinja").write_text(text)
        names.add(fingerprint_inputs(config, model)[0])
    rows.write_text('{"messages": [1]}\n')
    names.add(fingerprint_inputs(config, tiny_base)[0])
    assert len(names) == 7


def test_synthetic_rows_are_fingerprinted_with_the_code_and_data_that_generate_them() -> None:
    read: list[str] = []

    class RecordingDigests(FileDigests):
        def digest(self, path: str | Path) -> str:
            read.append(Path(path).name)
            return super().digest(path)

    fingerprint_source("synthetic:train:9:0", RecordingDigests())
    assert {"cases.py", "words.py", "target_tools.yaml"} <= set(read)
