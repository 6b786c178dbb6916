"""Prepared sets and global batches: every conversation once per epoch, in one order for any number of ranks."""

from __future__ import annotations

import fcntl
import itertools
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fctune.base.errors import DataError
from fctune.config.sections.data import DataConfig, SourceConfig
from fctune.data.chunk_encoder import Counts
from fctune.data.encoding import encode_sources
from fctune.data.loader import IGNORE, GlobalLoader, RowCost, deal_rows
from fctune.data.packing import pack_best_fit
from fctune.data.prepared_set import PreparedSet, describe_counts, is_validation, open_prepared, prepare
from fctune.data.synthetic import iter_conversations


def data_config(path: str = "synthetic:train:60:3", **changes: Any) -> DataConfig:
    return DataConfig(**({"sources": [SourceConfig(path=path)], "seq_len": 512, "packed": False} | changes))


@pytest.fixture(scope="module", params=[False, True], ids=["unpacked", "packed"])
def prepared(request: pytest.FixtureRequest, tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> PreparedSet:
    root = tmp_path_factory.mktemp("prepared")
    return prepare(data_config(packed=request.param, validation_share=0.2), tiny_base, root)


@given(
    world_size=st.integers(1, 16),
    micro=st.integers(1, 5),
    batch=st.integers(1, 40),
    seed=st.integers(0, 9),
    epoch=st.integers(0, 3),
)
@settings(max_examples=60, deadline=None)
def test_an_epoch_has_every_conversation_once(
    prepared: PreparedSet, world_size: int, micro: int, batch: int, seed: int, epoch: int
) -> None:
    loader = GlobalLoader(prepared, "train", batch, seed)
    seen: Counter[bytes] = Counter()
    for index in range(loader.steps_per_epoch):
        step = loader.step_at(epoch * loader.steps_per_epoch + index + 1)
        assert step.epoch == epoch
        shares = [loader.micro_batches(step, rank, world_size, micro) for rank in range(world_size)]
        assert len({len(share) for share in shares}) == 1
        rows = sorted(row for share in shares for b in share for row in b.rows if row >= 0)
        assert rows == list(range(len(step.packs)))
        for share in shares:
            for b in share:
                assert b.tokens.shape[0] <= micro
                if b.rows != (-1,):
                    seen.update(bytes(tokens) for tokens in split_rows(b))
    expected: Counter[bytes] = Counter()
    for pack in range(prepared.num_packs("train")):
        for member in prepared.members("train", pack):
            span = slice(*prepared.offsets[member : member + 2])
            expected[prepared.tokens[span].astype(np.int64).tobytes()] += 1
    assert seen == expected


@given(costs=st.lists(st.integers(0, 1000), max_size=80), num_ranks=st.integers(1, 16))
@settings(max_examples=200, deadline=None)
def test_rows_are_dealt_once_and_no_rank_gets_much_more_than_the_mean(costs: list[int], num_ranks: int) -> None:
    shares = deal_rows(costs, num_ranks)
    assert sorted(row for share in shares for row in share) == list(range(len(costs)))
    assert max(map(len, shares)) == -(-len(costs) // num_ranks)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert all(costs[row] >= costs[later] for share in shares for row, later in itertools.pairwise(share))
    sums = [sum(costs[row] for row in share) for share in shares]
    assert max(sums) - min(sums) <= max(costs, default=0)


@pytest.mark.parametrize("num_ranks", [2, 4, 16])
def test_ranks_wait_less_than_half_as_long_for_the_slowest_as_if_rows_came_in_any_order(num_ranks: int) -> None:
    """Costs with a long tail, as those of attention in packs of 32k tokens, which are all full: their order is any."""
    by_cost, in_turns = 0.0, 0.0
    for seed in range(200):
        costs = [int(cost) for cost in np.random.default_rng(seed).lognormal(5, 0.5, 4 * num_ranks)]
        mean = sum(costs) / num_ranks
        by_cost += max(sum(costs[row] for row in share) for share in deal_rows(costs, num_ranks)) / mean - 1
        in_turns += max(sum(costs[rank::num_ranks]) for rank in range(num_ranks)) / mean - 1
    assert by_cost < in_turns / 2


@given(
    world_size=st.integers(1, 16),
    micro=st.integers(1, 5),
    batch=st.integers(1, 40),
    cost=st.builds(RowCost, st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)),
)
@settings(max_examples=40, deadline=None)
def test_a_step_has_the_same_packs_whatever_they_cost_and_whoever_gets_them(
    prepared: PreparedSet, world_size: int, micro: int, batch: int, cost: RowCost
) -> None:
    loader = GlobalLoader(prepared, "train", batch, 1)
    for step in map(loader.step_at, range(1, loader.steps_per_epoch + 1)):
        expected = {row: loader.collate({row: pack}, 1) for row, pack in enumerate(step.packs)}
        seen: list[int] = []
        for rank in range(world_size):
            for dealt in loader.micro_batches(step, rank, world_size, micro, cost):
                seen += [row for row in dealt.rows if row >= 0]
                for index, row in enumerate(dealt.rows):
                    if row >= 0:
                        num_tokens = expected[row].num_tokens
                        assert dealt.row_lengths[index] == num_tokens
                        assert torch.equal(dealt.tokens[index, :num_tokens], expected[row].tokens[0, :num_tokens])
        assert sorted(seen) == list(range(len(step.packs)))


def test_a_row_costs_what_its_positions_pairs_and_supervised_tokens_do(prepared: PreparedSet) -> None:
    """The rank's first row is its most expensive one; counted here in the tensors of the batches."""
    loader = GlobalLoader(prepared, "train", 12, 1)
    cost, step = RowCost(50, 700, 3), loader.step_at(1)
    costs = []
    for batch in loader.micro_batches(step, 0, 1, 1, cost):
        num_positions = batch.tokens.shape[1] if prepared.is_packed else batch.num_tokens
        lengths = [num_positions] if batch.lengths is None else batch.lengths[0]
        num_pairs = sum(n + 1 for length in lengths for n in range(length))
        costs.append(50 * num_positions + 700 * batch.num_supervised + 3 * num_pairs)
    assert costs == sorted(costs, reverse=True)
    assert len(set(costs)) > len(costs) // 2


def split_rows(batch: Any) -> list[bytes]:
    """Return each conversation of a batch as bytes, without padding."""
    found = []
    for i in range(batch.tokens.shape[0]):
        row = batch.tokens[i].numpy()
        lengths = batch.lengths[i] if batch.lengths is not None else [len(row)]
        at = 0
        for length in lengths:
            piece = row[at : at + length]
            at += length
            if piece.any():
                found.append(np.trim_zeros(piece, "b").tobytes())
    return found


@given(seed=st.integers(0, 5), batch=st.integers(1, 40), stop=st.integers(1, 30))
@settings(max_examples=30, deadline=None)
def test_a_new_loader_continues_in_the_same_order(prepared: PreparedSet, seed: int, batch: int, stop: int) -> None:
    once = GlobalLoader(prepared, "train", batch, seed)
    steps = [once.step_at(k) for k in range(1, stop + 10)]
    assert [GlobalLoader(prepared, "train", batch, seed).step_at(k) for k in range(stop, stop + 10)] == steps[
        stop - 1 :
    ]


def test_epochs_differ_in_order(prepared: PreparedSet) -> None:
    loader = GlobalLoader(prepared, "train", prepared.num_packs("train"), 1)
    first, second = loader.step_at(1), loader.step_at(2)
    assert sorted(first.packs) == sorted(second.packs)
    assert first.data_digest != second.data_digest


def test_labels_are_the_next_supervised_token_of_the_same_conversation(prepared: PreparedSet) -> None:
    loader = GlobalLoader(prepared, "train", 4, 1)
    for batch in loader.micro_batches(loader.step_at(1), 0, 1, 4):
        tokens, labels, weights = batch.tokens, batch.labels, batch.loss_weights
        at = (labels[:, :-1] != IGNORE).nonzero()
        assert len(at) > 0
        for row, position in at.tolist():
            assert labels[row, position] == tokens[row, position + 1]
        assert ((labels != IGNORE) == (weights > 0)).all()
        if batch.lengths is not None and batch.positions is not None:
            for row, lengths in enumerate(batch.lengths):
                ends = np.cumsum(lengths) - 1
                assert (labels[row, ends] == IGNORE).all()
                assert batch.positions[row].tolist() == [i for n in lengths for i in range(n)]


@given(st.lists(st.integers(1, 100), min_size=1, max_size=300))
@settings(max_examples=100, deadline=None)
def test_packs_have_every_conversation_once_and_fit(lengths: list[int]) -> None:
    packs = pack_best_fit(lengths, 100)
    assert sorted(i for pack in packs for i in pack) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in pack) <= 100 for pack in packs)
    fills = sorted(sum(lengths[i] for i in pack) for pack in packs)
    assert len(fills) < 2 or fills[0] + fills[1] > 100, "two packs would fit in one"


def test_packs_waste_under_two_percent_on_realistic_lengths() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(6.3, 0.7, 20_000).astype(int), 32, 4096)
    packs = pack_best_fit(lengths.tolist(), 4096)
    assert lengths.sum() / (len(packs) * 4096) >= 0.98


def test_a_second_start_opens_the_same_set(tiny_base: Path, tmp_path: Path) -> None:
    first = prepare(data_config(), tiny_base, tmp_path)
    stamp = (first.path / "tokens.bin").stat().st_mtime_ns
    assert prepare(data_config(), tiny_base, tmp_path).path == first.path
    assert (first.path / "tokens.bin").stat().st_mtime_ns == stamp
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == [first.path.name]


def test_the_validation_split_depends_on_digests_alone() -> None:
    digests = np.array([(i * 2654435761 % 2**32) << 32 for i in range(10_000)], dtype=np.uint64)
    assert abs(is_validation(digests, 0.1).mean() - 0.1) < 0.01
    assert not is_validation(digests, 0.0).any()
    assert is_validation(digests, 1.0).all()


def test_no_conversation_is_in_both_splits(prepared: PreparedSet) -> None:
    splits = [
        {int(prepared.digests[m]) for p in range(prepared.num_packs(s)) for m in prepared.members(s, p)}
        for s in ("train", "validation")
    ]
    assert splits[0]
    assert splits[1]
    assert not splits[0] & splits[1]


@pytest.mark.parametrize(("num_rows", "num_held_out"), [(6, 0), (25, 1)])
def test_one_conversation_is_held_out_where_there_is_room_and_none_is_reported(
    num_rows: int, num_held_out: int, tiny_base: Path, tmp_path: Path
) -> None:
    config = data_config(f"synthetic:train:{num_rows}:3", validation_share=1e-9)
    small = prepare(config, tiny_base, tmp_path)
    assert (small.num_packs("train"), small.num_packs("validation")) == (num_rows - num_held_out, num_held_out)
    expected = "1 held out for validation" if num_held_out else "no conversation held out for validation"
    assert any(line.startswith(expected) for line in describe_counts(small))


def test_a_source_weight_repeats_or_subsamples_its_rows(tiny_base: Path, tmp_path: Path) -> None:
    def count(weight: float) -> int:
        source = SourceConfig(path="synthetic:train:400:3", weight=weight)
        return prepare(data_config(sources=[source], validation_share=0.0), tiny_base, tmp_path).num_packs("train")

    assert count(1.0) == 400
    assert count(2.0) == 800
    assert 150 < count(0.5) < 250
    assert 550 < count(1.5) < 650


def test_overlong_conversations_are_reported_dropped_or_cut(
    tiny_base: Path, write_rows: Callable[..., Path], tmp_path: Path
) -> None:
    def turn(text: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": text}, {"role": "assistant", "content": text}]

    rows = write_rows([{"messages": turn("one two") + turn("word " * 200)}, {"messages": turn("short")}])
    with pytest.raises(DataError, match=rf"{rows}:1: messages: .* tokens, over data.seq_len=64"):
        prepare(data_config(str(rows), seq_len=64, validation_share=0.0), tiny_base, tmp_path)
    dropped = prepare(data_config(str(rows), seq_len=64, validation_share=0.0, overlong="drop"), tiny_base, tmp_path)
    assert (dropped.counts.conversations, dropped.counts.overlong) == (1, 1)
    cut = prepare(data_config(str(rows), seq_len=64, validation_share=0.0, overlong="cut"), tiny_base, tmp_path)
    assert (cut.counts.conversations, cut.counts.cut) == (2, 1)
    assert np.diff(cut.offsets).max() <= 64


def test_invalid_rows_are_all_reported_or_skipped_by_choice(
    tiny_base: Path, write_rows: Callable[..., Path], tmp_path: Path
) -> None:
    good = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}
    bad = {"messages": [{"role": "user", "content": "Hi"}, {"role": "robot", "content": "Hello."}]}
    rows = write_rows([good, bad, good, {"messages": 3}])
    with pytest.raises(DataError) as caught:
        prepare(data_config(str(rows), validation_share=0.0), tiny_base, tmp_path)
    assert f"{rows}:2" in str(caught.value)
    assert f"{rows}:4" in str(caught.value)
    assert not list(tmp_path.glob(".*"))
    skipping = data_config(str(rows), validation_share=0.0, on_invalid="skip", max_invalid_share=0.5)
    kept = prepare(skipping, tiny_base, tmp_path)
    assert (kept.counts.conversations, kept.counts.invalid) == (2, 2)
    (source,) = kept.describe()["skipped"]
    assert (source["rows"], source["kinds"]) == (4, {"unknown_role": 1, "message_shape": 1})
    shown = "\n".join(describe_counts(kept))
    assert "2 of 4 rows (50%) skipped as invalid" in shown
    assert f"1 unknown_role, such as {rows}:2: " in shown
    assert f"1 message_shape, such as {rows}:4: " in shown
    with pytest.raises(DataError, match=r"2 of 4 rows \(50%\) .*data\.max_invalid_share=49%[^!]*=50%") as over:
        prepare(replace(skipping, max_invalid_share="49%"), tiny_base, tmp_path)  # the same set, which is kept
    assert f"1 unknown_role, such as {rows}:2: " in str(over.value)


def test_a_source_that_vanishes_stops_the_run_however_large_the_others_and_small_its_weight(
    tiny_base: Path, write_rows: Callable[..., Path], tmp_path: Path
) -> None:
    answer = {"role": "assistant", "content": "Hello."}
    # Control tokens are found when a row is encoded, which the weight leaves out for four rows of five.
    rows = [{"messages": [{"role": "user", "content": f"<|eot_id|> {i}"}, answer]} for i in range(50)]
    sources = [SourceConfig(path="synthetic:train:600:3"), SourceConfig(path=str(write_rows(rows)), weight=0.2)]
    config = data_config(sources=sources, on_invalid="skip")
    with pytest.raises(DataError, match=r"rows\.jsonl: (\d+) of \1 rows that .* \(100%\) skipped as") as caught:
        prepare(config, tiny_base, tmp_path)
    assert "synthetic" not in str(caught.value)


def test_conversations_that_are_too_long_stop_a_run_that_skips_invalid_rows_unless_it_drops_them(
    tiny_base: Path, tmp_path: Path
) -> None:
    config = data_config("synthetic:train:60:3", seq_len=256, on_invalid="skip", max_invalid_share="100%")
    with pytest.raises(DataError, match=r"overlong.*\n.*over data\.seq_len=256"):
        prepare(config, tiny_base, tmp_path)
    kept = prepare(replace(config, overlong="drop", max_invalid_share=0), tiny_base, tmp_path)
    assert kept.counts.overlong
    assert not kept.counts.invalid
    assert any(" dropped, longer than 256 tokens" in line for line in describe_counts(kept))


def test_rows_without_supervised_tokens_are_counted_and_dropped(
    tiny_base: Path, write_rows: Callable[..., Path], tmp_path: Path
) -> None:
    rows = write_rows([{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}])
    with pytest.raises(
        DataError, match=r"no row to train on: 1 read, 1 without supervised tokens under data\.train_on=calls"
    ):
        prepare(data_config(str(rows), train_on="calls"), tiny_base, tmp_path)


def test_every_training_row_has_supervised_tokens(prepared: PreparedSet) -> None:
    for i in range(len(prepared.digests)):
        codes = prepared.codes[prepared.offsets[i] : prepared.offsets[i + 1]]
        assert (prepared.weights[codes[1:]] > 0).any()


def test_a_damaged_set_is_rejected_by_name(tiny_base: Path, tmp_path: Path) -> None:
    path = prepare(data_config(), tiny_base, tmp_path).path
    with open(path / "tokens.bin", "r+b") as file:
        file.truncate(10)
    with pytest.raises(DataError, match="damaged prepared set"):
        open_prepared(path)


def test_containers_that_do_not_see_each_others_locks_prepare_the_same_rows_at_once(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their process IDs may be equal, as the two writers' here."""

    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    paths: list[Path] = []

    def prepare_again(_: Counts) -> None:
        if not paths:
            paths.append(prepare(data_config(), tiny_base, tmp_path).path)

    assert prepare(data_config(), tiny_base, tmp_path, prepare_again).path == paths[0]
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [paths[0].name]


def test_several_processes_encode_the_same_set_as_one(
    tiny_base: Path, write_rows: Callable[..., Path], tmp_path: Path
) -> None:
    bad = {"messages": [{"role": "user", "content": "Hi"}, {"role": "robot", "content": "Hello."}]}
    rows = [c.to_openai() for c in iter_conversations("train", 1500, 2)]  # the first 20 chunks of 64 stay here
    path = str(write_rows([*rows[:1400], bad, *rows[1400:]]))
    config = data_config(path, on_invalid="skip", call_weight=2.0, overlong="drop", seq_len=256)
    made = []
    for workers in (1, 3):
        counts = Counts()
        parts = list(encode_sources(config, tiny_base, counts, num_processes=workers))
        names = ("tokens", "weights", "lengths", "digests", "repeats")
        made.append((counts, [np.concatenate([getattr(part, name) for part in parts]).tolist() for name in names]))
    assert made[0] == made[1]
    assert made[0][0].rows == 1501
    assert made[0][0].invalid == 1
    with pytest.raises(DataError, match=r"rows\.jsonl:1401"):
        list(encode_sources(data_config(path, overlong="drop"), tiny_base, Counts(), num_processes=2))


@pytest.mark.thorough
def test_processes_that_encode_do_not_import_the_launching_script(tiny_base: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"""
open({str(tmp_path / "imports")!r}, "a").write("once more\\n")

if __name__ == "__main__":
    from pathlib import Path
    from fctune.config.sections.data import DataConfig, SourceConfig
    from fctune.data import encoding

    config = DataConfig(sources=[SourceConfig(path="synthetic:train:1500:0")], seq_len=512)
    counts = encoding.Counts()
    list(encoding.encode_sources(config, Path({str(tiny_base)!r}), counts, num_processes=4))
    print(counts.rows, len(__file__) > 0)
""")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["1500", "True"], done.stderr
    assert (tmp_path / "imports").read_text().count("once") == 1


@given(step=st.integers(0, 200), batch=st.integers(1, 40))
@settings(max_examples=30, deadline=None)
def test_a_saved_state_says_its_step(prepared: PreparedSet, step: int, batch: int) -> None:
    loader = GlobalLoader(prepared, "train", batch, 4)
    state = json.loads(json.dumps(loader.state_at(step)))
    GlobalLoader(prepared, "train", batch, 4).resume_at(state)
    assert state["epoch"] * loader.steps_per_epoch + state["position"] // batch == step


def test_a_state_of_other_data_is_rejected_with_the_differences(tiny_base: Path, tmp_path: Path) -> None:
    one = GlobalLoader(prepare(data_config(), tiny_base, tmp_path), "train", 4, 1)
    longer = prepare(data_config(seq_len=1024), tiny_base, tmp_path)
    with pytest.raises(DataError, match=r"data\.seq_len: was 512, is 1024"):
        GlobalLoader(longer, "train", 4, 1).resume_at(one.state_at(3))
    other_seed = GlobalLoader(one.prepared, "train", 4, 2)
    with pytest.raises(DataError, match="seed: was 1, is 2"):
        other_seed.resume_at(one.state_at(3))


def test_a_state_of_the_same_rows_elsewhere_is_accepted(tiny_base: Path, tmp_path: Path) -> None:
    def load(folder: str) -> GlobalLoader:
        config = data_config(str(tmp_path / folder / "rows.jsonl"))
        return GlobalLoader(prepare(config, tiny_base, tmp_path / folder / "prepared"), "train", 4, 1)

    lines = [json.dumps(row.to_openai()) + "\n" for row in iter_conversations("train", 30, 1)]
    for folder, used in (("a", lines), ("b", lines), ("c", lines[1:])):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "rows.jsonl").write_text("".join(used))
    state = load("a").state_at(3)
    load("b").resume_at(state)
    # As versions saved it whose sets were named by paths, too.
    load("b").resume_at(state | {"fingerprint": "0" * 16})
    with pytest.raises(DataError, match=r"data\.sources: was .*a/rows.jsonl.*, is .*c/rows.jsonl"):
        load("c").resume_at(state)


def test_unpacked_rows_can_have_a_constant_shape(tiny_base: Path, tmp_path: Path) -> None:
    prepared = prepare(data_config(), tiny_base, tmp_path)
    shapes = set()
    for pad_to in ("longest", "seq_len"):
        loader = GlobalLoader(prepared, "train", 8, 1, pad_to=pad_to)  # type: ignore[arg-type]
        shapes.add(loader.micro_batches(loader.step_at(1), 0, 1, 8)[0].tokens.shape[1])
    assert max(shapes) == 512
    assert min(shapes) < 512


@pytest.mark.parametrize("is_packed", [False, True], ids=["unpacked", "packed"])
def test_full_batches_have_one_shape_in_both_splits_and_the_same_tokens(
    is_packed: bool, tiny_base: Path, tmp_path: Path
) -> None:
    config = data_config("synthetic:train:90:3", packed=is_packed, validation_share=0.2)
    prepared = prepare(config, tiny_base, tmp_path)
    shapes, lengths, contents = set(), set(), []
    for has_full_batches in (True, False):
        tokens: Counter[int] = Counter()
        for split in ("train", "validation"):
            options: dict[str, Any] = {"pad_to": "seq_len", "has_full_batches": has_full_batches}
            loader = GlobalLoader(prepared, split, 7, 1, **options)  # type: ignore[arg-type]
            for step in range(1, loader.steps_per_epoch + 1):
                for rank in range(3):
                    for batch in loader.micro_batches(loader.step_at(step), rank, 3, 2):
                        tokens.update(batch.tokens.flatten().tolist())
                        assert batch.tokens.shape[0] == len(batch.rows)
                        assert batch.num_supervised == (batch.labels != IGNORE).sum()
                        if has_full_batches:
                            shapes.add((batch.tokens.shape, batch.positions is None))
                            lengths.add(tuple(len(row) for row in batch.lengths or ()))
                            assert all(sum(row) == 512 for row in batch.lengths or ())
        del tokens[0]
        contents.append(tokens)
    assert shapes == {((2, 512), not is_packed)}
    assert len(lengths) == 1
    assert contents[0] == contents[1]


def test_lengths_of_unpacked_rows_are_multiples_of_16(tiny_base: Path, tmp_path: Path) -> None:
    prepared = prepare(data_config(), tiny_base, tmp_path)
    loader = GlobalLoader(prepared, "train", 8, 1)
    batches = [b for k in range(1, 5) for rank in (0, 1) for b in loader.micro_batches(loader.step_at(k), rank, 9, 1)]
    assert len({batch.tokens.shape[1] for batch in batches}) > 3
    assert all(batch.tokens.shape[1] % 16 == 0 for batch in batches)


def test_a_full_disk_leaves_no_set(tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(DataError, match=r"cannot write the prepared set \(No space left on device\)"):
        prepare(data_config(), tiny_base, tmp_path)
    assert not list(tmp_path.iterdir())


def test_reading_an_epoch_does_not_grow_the_resident_memory(tmp_path: Path, tiny_base: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "1234567890" * 400}, {"role": "assistant", "content": str(n)}]}
        for n in range(1200)
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(sources=[SourceConfig(path=str(file))], validation_share=0.0, seq_len=8192)
    prepared = prepare(config, tiny_base, tmp_path / "prepared")
    size = 5 * len(prepared.tokens)  # bytes of tokens and their codes
    assert size > 20e6
    loader = GlobalLoader(prepared, "train", 16, 1)

    def mapped() -> int:
        status = Path("/proc/self/status").read_text()
        return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("RssFile")))

    before = mapped()
    for step in range(1, loader.steps_per_epoch + 1):
        loader.micro_batches(loader.step_at(step), 0, 1, 4)
    assert mapped() - before < size / 4
