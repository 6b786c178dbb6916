"""Augmented and replayed rows in prepared sets and files: on one side of a split, counted, and the same each time."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fctune.apps.report.data_page import write_data_html
from fctune.base.errors import ConfigError, DataError
from fctune.cli import main
from fctune.config.loading import load_config
from fctune.config.sections.data import ADDITIONS, AUGMENT_KINDS, AugmentConfig, DataConfig, ReplayConfig, SourceConfig
from fctune.data import encoding
from fctune.data.augment.augmented_file import augment_source
from fctune.data.augment.augmenter import AugmentCounts, KindCounts, is_held_out
from fctune.data.check import check_sources
from fctune.data.chunk_encoder import KIND_BITS, Counts
from fctune.data.conversation_encoder import ConversationEncoder
from fctune.data.conversion import convert_source
from fctune.data.data_size import find_prepared
from fctune.data.encoding import count_replayed, divide_by_weight, encode_sources
from fctune.data.prepared_set import PreparedSet, describe_counts, open_prepared, prepare
from fctune.data.sources import ParsedRow, parse_source
from fctune.tasks.evaluation.held_out import find_held_out_cases
from fctune.tasks.evaluation.row_cases import make_row_cases, split_by_question
from tests.conftest import ROOT, TINY_BASE

HALF = dict.fromkeys(AUGMENT_KINDS, "50%")
REPLAY_BIT = 1 << 15


def make_config(**changes: Any) -> DataConfig:
    values = {"sources": [SourceConfig(path="synthetic:train:240:3")], "seq_len": 1024, "validation_share": 0.2}
    return DataConfig(**(values | {"augment": AugmentConfig(**HALF)} | changes))


def list_texts(prepared: PreparedSet, split: Any) -> dict[int, list[bytes]]:
    """Return the tokens of each sample of a split, by the digest of the row that it is of or was made of."""
    flat, _ = prepared.packs[split]
    found: dict[int, list[bytes]] = {}
    for sample in flat.tolist():
        tokens = prepared.tokens[slice(*prepared.offsets[sample : sample + 2])].tobytes()
        found.setdefault(int(prepared.digests[sample]), []).append(tokens)
    return found


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedSet:
    return prepare(make_config(), TINY_BASE, tmp_path_factory.mktemp("prepared"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> PreparedSet:
    return prepare(make_config(augment=None), TINY_BASE, tmp_path_factory.mktemp("plain"))


def test_added_rows_are_on_the_side_of_their_original_and_held_out_rows_are_as_they_were(
    prepared: PreparedSet, plain: PreparedSet
) -> None:
    train, validation = list_texts(prepared, "train"), list_texts(prepared, "validation")
    assert not train.keys() & validation.keys()
    assert validation == list_texts(plain, "validation")
    assert train.keys() == list_texts(plain, "train").keys()
    assert max(map(len, train.values())) == 4
    assert all(len(texts) == 1 for texts in validation.values())
    assert prepared.kinds is not None
    held = np.isin(prepared.digests, np.array(list(validation), dtype=np.uint64))
    assert not prepared.kinds[held].any()
    assert prepared.kinds[~held].any()


def test_nothing_of_a_held_out_row_is_used_in_others(clean: Path) -> None:
    config = make_config(sources=[SourceConfig(path=str(clean))])
    augmenter = encoding._make_augmenter(config)
    assert augmenter is not None
    rows = [row for row in parse_source(str(clean)) if isinstance(row, ParsedRow)]
    trained = [row.conversation for row in rows if not is_held_out(int(row.digest(), 16), 0.2)]
    assert 20 < len(rows) - len(trained) < 80
    tools = {tool.to_json() for row in trained for tool in row.tools}
    requests = {" ".join(m.content or "" for m in row.messages if m.role == "user") for row in trained}
    assert {tool.to_json() for tool in augmenter.pool.tools} == tools
    known = [request.text for tool in augmenter.pool.tools for request in augmenter.pool.requests(tool)]
    assert known
    assert all(any(text in request for request in requests) for text in known)


def test_counts_add_up_and_are_described(prepared: PreparedSet, plain: PreparedSet) -> None:
    counts = prepared.counts
    assert counts.conversations == plain.counts.conversations + counts.added
    assert prepared.kinds is not None
    for kind, made in prepared.augmented.items():
        bit = (prepared.kinds & KIND_BITS[kind]) > 0
        added = (prepared.kinds & sum(KIND_BITS[one] for one in ADDITIONS)) > 0
        assert made.made == int((bit & (added == (kind in ADDITIONS))).sum())
        assert made.rows == made.eligible + made.unsuitable.total()
        assert made.chosen == made.made + made.left_out.total()
    assert counts.added == sum(prepared.augmented[kind].made for kind in ADDITIONS)
    text = "\n".join(describe_counts(prepared))
    assert f"{counts.changed:,} conversations changed and {counts.added:,} added by data.augment" in text
    assert all(f"  {kind}=50%: {made.made:,} " in text for kind, made in prepared.augmented.items())
    described = prepared.describe()["augmented"]
    assert described == json.loads(json.dumps(described))
    assert {kind: KindCounts.from_json(one) for kind, one in described.items()} == prepared.augmented
    assert open_prepared(prepared.path).augmented == prepared.augmented
    assert "augmented" not in plain.describe()


@pytest.mark.parametrize("num_processes", [2, *(pytest.param(number, marks=pytest.mark.thorough) for number in (1, 3))])
def test_the_number_of_processes_changes_nothing(num_processes: int) -> None:
    config = make_config(replay=ReplayConfig(sources=[SourceConfig(path="synthetic:pretrain:150:5")], share="20%"))

    def read(number: int) -> tuple[list[Any], dict[str, Any], Counts]:
        counts, augmented = Counts(), AugmentCounts()
        parts = list(encode_sources(config, TINY_BASE, counts, number))
        for part in parts:
            for kind, one in part.augmented.items():
                augmented.setdefault(kind, KindCounts()).add(one)
        arrays = [
            np.concatenate([getattr(p, name) for p in parts]) for name in ("tokens", "weights", "digests", "kinds")
        ]
        return [array.tobytes() for array in arrays], {k: one.to_json() for k, one in augmented.items()}, counts

    assert read(num_processes) == read(1)


def test_a_small_set_holds_out_a_conversation_with_all_that_is_made_of_it(tmp_path: Path) -> None:
    config = make_config(sources=[SourceConfig(path="synthetic:train:40:8")], validation_share=1e-9)
    prepared = prepare(config, TINY_BASE, tmp_path)
    train, validation = list_texts(prepared, "train"), list_texts(prepared, "validation")
    assert len(validation) == 1
    assert not train.keys() & validation.keys()


@pytest.mark.thorough
def test_weights_count_for_what_is_made_of_a_row(tmp_path: Path) -> None:
    once = prepare(make_config(validation_share=0), TINY_BASE, tmp_path)
    source = SourceConfig(path="synthetic:train:240:3", weight=2.0)
    twice = prepare(make_config(validation_share=0, sources=[source]), TINY_BASE, tmp_path)
    assert twice.num_tokens("train") == 2 * once.num_tokens("train")


def test_made_rows_that_are_too_long_are_left_out_and_do_not_stop_the_run(tmp_path: Path) -> None:
    config = make_config(augment=AugmentConfig(distract=1.0), validation_share=0, seq_len=420, overlong="drop")
    prepared = prepare(config, TINY_BASE, tmp_path)
    without = prepare(replace(config, augment=None), TINY_BASE, tmp_path)
    assert prepared.augmented["distract"].left_out["longer than data.seq_len"] > 5
    assert prepared.counts.conversations == without.counts.conversations
    assert prepared.counts.overlong == without.counts.overlong


def test_rows_that_the_template_does_not_render_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 2

    def encode(self: Any, conversation: Any) -> Any:
        if any(len(message.calls) > limit for message in conversation.messages):
            raise DataError("the chat template does not print call 2")
        return original(self, conversation)

    rows = tmp_path / "rows.jsonl"
    lines = [row for row in parse_source("synthetic:train:300:3") if isinstance(row, ParsedRow)]
    single = [row.conversation for row in lines if all(len(m.calls) < 2 for m in row.conversation.messages)]
    rows.write_text("".join(json.dumps(row.to_openai()) + "\n" for row in single))
    original = ConversationEncoder.encode
    monkeypatch.setattr(ConversationEncoder, "encode", encode)
    config = make_config(sources=[SourceConfig(path=str(rows))], augment=AugmentConfig(repeat=1.0, take_away=1.0))
    prepared = prepare(config, TINY_BASE, tmp_path / "prepared")
    assert prepared.augmented["repeat"].left_out["not rendered by the chat template"] > 10
    assert prepared.augmented["repeat"].made > 10
    assert prepared.augmented["take_away"].made > 10
    assert prepared.counts.invalid == 0
    limit = 1
    with pytest.raises(DataError, match=r"repeat=100%: none of the \d+ rows chosen .* rendered by the chat template"):
        prepare(config, TINY_BASE, tmp_path / "other")


def test_a_kind_that_applies_to_no_row_ends_the_preparation(tmp_path: Path) -> None:
    config = make_config(sources=[SourceConfig(path="synthetic:pretrain:60:1")], augment=AugmentConfig(ask=0.5))
    with pytest.raises(DataError, match=r"data\.augment\.ask=50%: applies to none of the \d+ rows"):
        prepare(config, TINY_BASE, tmp_path)


# Replay --------------------------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize(("share", "weight"), [("10%", 1.0), (0.3, 2.5)])
def test_replayed_rows_have_their_share_of_the_training_conversations(
    share: float | str, weight: float, tmp_path: Path
) -> None:
    replay = ReplayConfig(sources=[SourceConfig(path="synthetic:pretrain:900:5")], share=share)
    sources = [SourceConfig(path="synthetic:train:240:3", weight=weight)]
    prepared = prepare(make_config(replay=replay, sources=sources, overlong="drop"), TINY_BASE, tmp_path)
    assert prepared.kinds is not None
    flat, _ = prepared.packs["train"]
    is_replayed = prepared.kinds[flat] == REPLAY_BIT
    num = float(str(share).rstrip("%")) / (100 if "%" in str(share) else 1)
    assert is_replayed.sum() == prepared.counts.replayed
    assert abs(is_replayed.mean() - num) < 0.5 / len(flat) + 1e-9
    held, _ = prepared.packs["validation"]
    assert not (prepared.kinds[held] == REPLAY_BIT).any()
    assert prepared.describe()["replayed"] == prepared.counts.replayed
    assert f"{prepared.counts.replayed:,} conversations of data.replay" in "\n".join(describe_counts(prepared))


def test_replayed_rows_are_drawn_from_all_of_a_source_each_once(tmp_path: Path) -> None:
    path = "synthetic:pretrain:600:5"
    replay = ReplayConfig(sources=[SourceConfig(path=path)], share="20%")
    prepared = prepare(make_config(replay=replay, augment=None), TINY_BASE, tmp_path)
    rows = [row.digest() for row in parse_source(path) if isinstance(row, ParsedRow)]
    place = {int(digest, 16): number for number, digest in enumerate(rows)}
    assert prepared.kinds is not None
    drawn = Counter(place[int(digest)] for digest in prepared.digests[prepared.kinds == REPLAY_BIT])
    copies = Counter(int(digest, 16) for digest in rows)
    assert all(count <= copies[int(rows[number], 16)] for number, count in drawn.items())
    assert sum(number > 300 for number in drawn) > len(drawn) / 4


def test_sources_to_replay_divide_their_rows_by_weight(tmp_path: Path) -> None:
    sources = [
        SourceConfig(path="synthetic:pretrain:400:5", weight=3.0),
        SourceConfig(path="synthetic:varied:400:5", weight=1.0),
    ]
    config = make_config(replay=ReplayConfig(sources=sources, share="25%"), augment=None, overlong="drop")
    prepared = prepare(config, TINY_BASE, tmp_path)
    first, second = prepared.sources[1:]
    assert [source.path for source in prepared.sources] == ["synthetic:train:240:3", *(s.path for s in sources)]
    assert first.sampled == pytest.approx(3 * second.sampled, abs=2)


def test_too_few_rows_to_replay_are_an_error_that_says_how_many(tmp_path: Path) -> None:
    replay = ReplayConfig(sources=[SourceConfig(path="synthetic:pretrain:12:5")], share="50%")
    says = r"data\.replay\.share=50% needs \d+ conversations of it, and \d+ of its 12 rows can be used"
    with pytest.raises(DataError, match=says):
        prepare(make_config(replay=replay), TINY_BASE, tmp_path)


def test_numbers_of_rows_to_replay() -> None:
    assert [count_replayed(num, 0.05) for num in (0, 1, 95, 1900)] == [0, 1, 5, 100]
    assert divide_by_weight(10, [1, 1, 1]) == [3, 4, 3]
    assert divide_by_weight(7, [2.5, 0.5]) == [6, 1]


# Files ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("clean") / "rows.jsonl"
    convert_source("synthetic:train:240:3", out)
    return out


@pytest.fixture(scope="module", params=["clean", "synthetic:train:240:3"])
def written(request: pytest.FixtureRequest, clean: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("augmented") / "rows.jsonl"
    source = str(clean) if request.param == "clean" else request.param
    report = augment_source(source, out, AugmentConfig(**HALF), validation_share=0.2)
    assert report.written == len(out.read_text().splitlines()) == report.rows + report.added
    return out


@pytest.mark.sample(1)
def test_a_file_of_augmented_rows_keeps_each_family_on_one_side(written: Path, clean: Path, tmp_path: Path) -> None:
    config = make_config(sources=[SourceConfig(path=str(written))], augment=None, validation_share=0.2)
    prepared = prepare(config, TINY_BASE, tmp_path)
    own = {int(row.digest(), 16) for row in parse_source(str(clean)) if isinstance(row, ParsedRow)}
    train, validation = list_texts(prepared, "train"), list_texts(prepared, "validation")
    assert train.keys() | validation.keys() == own
    assert not train.keys() & validation.keys()
    assert prepared.kinds is not None
    assert (prepared.kinds > 0).sum() > 150
    # The same rows as with the same keys in a config.
    in_config = prepare(make_config(sources=[SourceConfig(path=str(clean))]), TINY_BASE, tmp_path)
    assert list_texts(in_config, "train") == train
    assert list_texts(in_config, "validation") == validation


def test_a_check_counts_augmented_rows_and_takes_no_twin_for_a_repeat(written: Path, tmp_path: Path) -> None:
    report, before = check_sources([str(written)]), check_sources(["synthetic:train:240:3"])
    rows = [json.loads(line).get("metadata", {}).get("augmented") for line in written.read_text().splitlines()]
    marks = [mark for mark in rows if mark]
    assert report.augmented.changed + report.augmented.added == len(marks)
    assert report.augmented.added == sum(not set(ADDITIONS).isdisjoint(mark["kinds"]) for mark in marks)
    assert report.augmented.kinds == Counter(kind for mark in marks for kind in mark["kinds"])
    assert report.defects == 0
    assert report.warnings <= 4 * before.warnings
    assert all(re.search(r":\d+$", mark["from"]) for mark in marks)
    same = {(one.row, one.earlier) for one in report.near_duplicate_examples}
    by_line = {f"{written}:{number}": mark for number, mark in enumerate(rows, 1)}
    digests = {line: mark["digest"] for line, mark in by_line.items() if mark}
    assert not [pair for pair in same if digests.get(pair[0], 0) == digests.get(pair[1], 1)]
    page = tmp_path / "report.html"
    write_data_html(report, page)
    assert f"{report.augmented.added:,}" in page.read_text()
    assert "Augmentation" in page.read_text()


def test_a_converted_file_keeps_the_marks(written: Path, tmp_path: Path) -> None:
    out = tmp_path / "converted.jsonl"
    report = convert_source(str(written), out)
    assert out.read_bytes() == written.read_bytes()
    assert report.unchanged == report.rows


def test_cases_of_one_family_are_not_split(written: Path) -> None:
    made = make_row_cases([str(written)])
    origins = {case.row["id"]: case.origin for case in made.cases}
    split = split_by_question(made.cases, 0.3)
    sides = [{origins[case.row["id"]] for case in side} for side in (split.train, split.test)]
    assert not sides[0] & sides[1]
    assert len(origins) > len(set(origins.values()))


def test_a_held_out_row_of_a_file_is_one_case(written: Path, tmp_path: Path) -> None:
    config = make_config(sources=[SourceConfig(path=str(written))], augment=None)
    prepared = prepare(config, TINY_BASE, tmp_path)
    cases = find_held_out_cases(config, prepared)
    assert len({case.id for case in cases}) == len(cases) > 5


# Commands and configs ------------------------------------------------------------------------------------------------


def run(*arguments: object) -> int:
    return main([*map(str, arguments)])


def test_the_command_writes_the_same_file_for_the_same_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kinds = "take_away=20%,ask=0.3,mask_names"
    files = [tmp_path / f"{name}.jsonl" for name in ("one", "two", "three")]
    for file, seed in zip(files, (1, 1, 2), strict=True):
        assert run("data", "augment", "synthetic:train:90:2", file, "--kinds", kinds, "--seed", seed, "--json",
                   tmp_path / "counts.json") == 0  # fmt: skip
    assert files[0].read_bytes() == files[1].read_bytes() != files[2].read_bytes()
    counts = json.loads((tmp_path / "counts.json").read_text())
    assert counts["written"] == counts["rows"] + counts["added"] == len(files[2].read_text().splitlines())
    assert f"take_away=20%: {counts['kinds']['take_away']['made']} added" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--kinds", "take_awy=10%"], "take_awy: unknown kind; did you mean take_away? (known: distract, mask_names"),
        (["--kinds", "ask=101%"], "ask=101%: expected a share, such as 10% or 0.1, of at most 100%"),
        (["--kinds", "ask=0"], "ask=0: no row would be chosen; leave it out"),
        (["--kinds", "ask,ask=3%"], "ask: is there twice"),
        (["--kinds", "ask", "--max-tools", "2"], "--max-tools 2: expected 3 or more"),
        (["--kinds", "ask", "--validation-share", "2"], "expected a share"),
        ([], "the following arguments are required: --kinds"),
        (["--kinds", "ask=1e-6"], "--kinds ask=0.0001%: selects none of the"),
    ],
)
def test_wrong_options_are_one_sentence(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    try:
        code = run("data", "augment", "synthetic:train:40:2", out, *arguments)
    except SystemExit as stop:
        code = int(stop.code or 0)
    assert code == 2
    assert says in " ".join(capsys.readouterr().err.split())
    assert not out.exists()


def test_a_row_is_shown_with_what_is_made_of_it(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kinds = "mask_names,take_away,ask,repeat"
    found = ""
    for row in range(1, 12):
        assert run("data", "show", "synthetic:train:60:3", "--row", row, "--augment", kinds) == 0
        found += capsys.readouterr().out
    assert re.search(r"^changed: mask_names$", found, re.M)
    assert re.search(r"^added: mask_names, take_away$", found, re.M)
    assert re.search(r"^no ask: ", found, re.M)
    number = next(n for n, line in enumerate(written.read_text().splitlines(), 1) if '"augmented"' in line)
    assert run("data", "show", written, "--row", number, "--tokenizer", TINY_BASE) == 0
    assert re.match(r"augmented: [a-z_, ]+ of .*:\d+\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["data.augment={take_awy: 5%}"], "data.augment.take_awy: unknown key; did you mean data.augment.take_away?"),
        (["data.augment={ask: 120%}"], "data.augment.ask=120%: expected a share"),
        (["data.augment={ask: -0.1}"], "data.augment.ask=-0.1: expected a share"),
        (["data.augment={}"], "data.augment: every share is 0; set one"),
        (["data.augment={ask: 0.1, max_tools: 2}"], "data.augment.max_tools=2: expected 3 or more"),
        (
            ["data.augment={ask: 0.1}", "data.pairs=true"],
            "data.augment: changes and adds conversations, and the rows are",
        ),
        (["data.replay={share: 0.1}"], "data.replay.sources"),
        (["data.replay={sources: []}"], "data.replay.sources=[]: empty"),
        (
            ["data.replay={sources: [{path: synthetic:pretrain:9}], share: 100%}"],
            "data.replay.share=100%: expected more",
        ),
        (
            ["data.replay={sources: [{path: /nowhere.jsonl}]}"],
            "data.replay.sources.0.path=/nowhere.jsonl: no such file",
        ),
        (
            ["data.replay={sources: [{path: synthetic:pretrain:9}]}", "data.pairs=true"],
            "data.replay: mixes conversations in, and the rows are preference pairs; remove it",
        ),
    ],
)
def test_wrong_configs_are_refused(overrides: list[str], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(ROOT / "configs" / "tiny_full.yaml", [f"output_dir={tmp_path}/run", *overrides])
    assert says in str(error.value)


def test_a_plan_finds_the_set_of_its_own_augmentation(tmp_path: Path) -> None:
    def load(*overrides: str) -> Any:
        common = [f"output_dir={tmp_path}/run", f"model.path={TINY_BASE}", "data.sources.0.path=synthetic:train:120:7"]
        return load_config(ROOT / "configs" / "tiny_full.yaml", [*common, f"data.prepared_dir={tmp_path}", *overrides])

    augmented = load("data.augment={take_away: 30%}")
    replayed = load("data.replay={sources: [{path: synthetic:pretrain:90:1}], share: 10%}")
    assert find_prepared(augmented, None) is None
    first = prepare(augmented.data, TINY_BASE, tmp_path)
    assert [find_prepared(config, None) is not None for config in (augmented, replayed, load())] == [True, False, False]
    same = load("data.augment={take_away: 0.3}")
    found = find_prepared(same, None)
    assert found is not None
    assert found[0].fingerprint == first.fingerprint
    prepare(replayed.data, TINY_BASE, tmp_path)
    assert [find_prepared(config, None) is not None for config in (augmented, replayed, load())] == [True, True, False]
