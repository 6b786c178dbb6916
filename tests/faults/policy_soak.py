"""Kills runs of reinforcement at random, and proves from their records that each answer counted once.

A trial is a run on answers in process, or of a server with vLLM's API in a process of its own, which is killed, too.
Its ranks are killed in every phase until it completes. Then its records must be complete: every step, and for every
case of every batch all answers, each once and as the checkpoint had it. A replay trains on the answers in its log
without an interruption, and must get the same weights bit by bit: no answer was trained twice, or with another
advantage. Where interruptions change no answer, everything must equal an uninterrupted run. Rewards and advantages are
recomputed from the recorded parts by other code. The server also lies: it spoils some answers once, and some each time.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import shutil
import socket
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fctune.config.intervals import format_count
from tests.conftest import TINY_BASE
from tests.faults.groups import GRPO, Ended, Fault, run_group
from tests.faults.harness import final_weights, make_inputs, read_metrics
from tests.ranks import context, find_port

NUM_STEPS, NUM_PROMPTS, GROUP_SIZE, SEED = 8, 2, 3, 3
MAX_NEW_TOKENS = 8
VOCAB_SIZE = json.loads((TINY_BASE / "config.json").read_text())["vocab_size"]
CASES = "synthetic:train:12:1"

COMMON_PHASES = ("policy", "sample", "judge", "log", "step", "update", "stage", "write", "publish", "mark", "prune")
PHASES = {"in_process": (*COMMON_PHASES, "judged", "read"), "server": (*COMMON_PHASES, "load", "read")}
OUTAGE = "server"
# The parts of a run that the phases belong to.
PARTS = {
    "sampling": ("sample",),
    "judging": ("judge", "judged", "log"),
    "update": ("step", "update"),
    "publishing": ("policy", "load"),
    "saving": ("stage", "write", "publish", "mark", "prune", "sweep"),
    "resuming": ("read",),
    "server lost": (OUTAGE,),
}
LIMIT_S = 600.0

Key = tuple[str, int]  # case and sample, which is counted over the passes


@dataclasses.dataclass(frozen=True)
class Setting:
    """An engine and how far it generates ahead."""

    engine: str
    staleness: int
    updates: int
    is_lying: bool = False

    @property
    def is_repeatable(self) -> bool:
        """True if an interruption changes no answer: ahead, a restart asks a newer policy for the missing ones."""
        return self.staleness == 0


SETTINGS = (
    *(Setting("in_process", 0, 1), Setting("server", 1, 1)),
    *(Setting("in_process", 0, 2), Setting("server", 0, 1), Setting("server", 1, 2)),
    *(Setting("server", 0, 1, is_lying=True), Setting("server", 1, 1, is_lying=True), Setting("server", 2, 1)),
)


class StandInServer:
    """A server with vLLM's API in a process of its own, which ``lose`` kills and starts again; it may lie."""

    def __init__(self, model: Path, is_lying: bool = False):
        self._model, self._port, self._is_lying = model, find_port(), is_lying
        self.url = f"http://127.0.0.1:{self._port}"
        self._start()

    def _start(self) -> None:
        self._process = context.Process(target=_serve, args=(self._model, self._port, self._is_lying), daemon=True)
        self._process.start()
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self._port), 1.0):
                return
            time.sleep(0.05)
        raise TimeoutError(f"no server after {LIMIT_S:.0f} s")

    def lose(self, outage_s: float = 1.0) -> None:
        """Kill it, and start it again without the adapters that it had."""
        self.stop()
        time.sleep(outage_s)
        self._start()

    def stop(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.join()


def _serve(model: Path, port: int, is_lying: bool) -> None:
    import torch

    from tests.engines.vllm_stand_in import VllmStandIn

    torch.set_num_threads(1)
    server = VllmStandIn(model, port=port)
    if is_lying:
        server.choose_lie = make_liar()
    threading.Event().wait()


def make_liar() -> Callable[[dict[str, Any]], str | None]:
    """Return a liar that spoils half of the requests once, and a tenth each time, in a way that the seed chooses."""
    from tests.engines.vllm_stand_in import LIES

    names, asked = list(LIES), Counter[int]()

    def choose(body: dict[str, Any]) -> str | None:
        asked[body["seed"]] += 1
        kind = body["seed"] % 10
        lies = kind == 0 or (kind < 6 and asked[body["seed"]] == 1)
        return names[body["seed"] // 10 % len(names)] if lies else None

    return choose


def arguments_for(run: Path, model: Path, setting: Setting, url: str) -> list[str]:
    """Return the command line of a short run in float64; its rewards depend on the answers' texts alone."""
    server = (f"grpo.server.url={url}", f"grpo.max_staleness={setting.staleness}")
    return [
        *("--config", GRPO, f"output_dir={run}", f"model.path={model}", "precision=fp64", f"grpo.cases={CASES}"),
        *(
            f"grpo.prompts_per_step={NUM_PROMPTS}",
            f"grpo.group_size={GROUP_SIZE}",
            f"grpo.max_new_tokens={MAX_NEW_TOKENS}",
        ),
        *("grpo.reward={random: 1.0, brevity: 0.5}", "grpo.mask_cut=false", "data.seq_len=1024", "adapter.rank=2"),
        *(f"grpo.updates_per_batch={setting.updates}", f"grpo.engine={setting.engine}", "optimizer.lr=1e-2"),
        *(server if setting.engine == "server" else ()),
        *("checkpoint.every=2", "checkpoint.elastic_every=3", "checkpoint.keep_last=2", "epochs=99"),
        *(f"max_steps={NUM_STEPS}", f"seed={SEED}"),
    ]


def read_answers(run: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's log of answers, without the seconds of judging."""
    rows = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "judging_s"} for row in rows]


def has_checkpoint(run: Path) -> bool:
    """Return True if a restart resumes."""
    return any(run.glob("checkpoints/*/*_SUCCESS"))


def read_saved_answers(run: Path) -> dict[Key, Any]:
    """Return the answers in the newest complete checkpoint, which a restart must not ask again."""
    from fctune.checkpoint.store import CheckpointStore

    found: dict[Key, Any] = {}
    for checkpoint in CheckpointStore(run / "checkpoints").list_complete()[:1]:
        state = json.loads((checkpoint.path / "trainer_state.json").read_text())["loader"]
        rows = [row for group in state["groups"] for row in group["rollouts"] if row is not None]
        if state["batch"] is not None:
            rows += [row for group in state["batch"]["groups"] for row in group]
        found |= {(row["case_id"], row["sample"]): _identify(row) for row in rows}
    return found


def _identify(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row["ids"]), tuple(row["logprobs"]), row["version"], row["reward"]


def find_record_problems(run: Path, setting: Setting, saved: dict[Key, Any]) -> list[str]:
    """List what is missing, doubled or changed in the records of a complete run.

    Args:
        run: Directory of the run.
        setting: Its engine.
        saved: Answers that were in the checkpoints it resumed from.
    """
    metrics, rows = read_metrics(run), read_answers(run)
    problems = []
    if [one["step"] for one in metrics] != list(range(1, NUM_STEPS + 1)):
        problems.append(f"steps {[one['step'] for one in metrics]}")
    answers = {(row["case_id"], row["sample"]): row for row in rows}
    if len(answers) != len(rows):
        problems.append(f"{format_count(len(rows) - len(answers), 'answer')} counted twice")
    by_batch: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_batch[row["batch"]].append(row)
    if list(by_batch) != list(range(1, NUM_STEPS // setting.updates + 1)):
        problems.append(f"batches {list(by_batch)}")
    order, position = _order_cases(), 0
    for number, of_batch in by_batch.items():
        step = (number - 1) * setting.updates + 1
        one = metrics[step - 1]
        counted = (len(of_batch), sum(row["advantage"] is not None for row in of_batch))
        if {row["step"] for row in of_batch} != {step} or counted != (one["answers"], one["answers_trained"]):
            problems.append(f"batch {number}: {counted} answers in all and trained, and in the metrics others")
        num_cases, left = divmod(len(of_batch), GROUP_SIZE)
        asked = Counter(row["case_id"] for row in of_batch)
        due = Counter(order[position : position + num_cases])
        is_due = asked == Counter({case: GROUP_SIZE * times for case, times in due.items()})
        if left or not (is_due or setting.staleness):  # ahead, all batches together are compared below
            problems.append(f"batch {number}: {dict(asked)} answers, and due were {dict(due)} groups")
        groups = Counter((row["case_id"], row["sample"] // GROUP_SIZE) for row in of_batch)
        if set(groups.values()) != {GROUP_SIZE}:
            problems.append(f"batch {number}: samples are missing")
        position += num_cases
        ages = {step - 1 - row["version"] for row in of_batch}
        if min(ages) < 0 or max(ages) > setting.staleness * setting.updates:
            problems.append(f"batch {number}: answers of versions {sorted(ages)} updates old")
        errors = [row["error"] for row in of_batch if row["error"]]
        if any(not (setting.is_lying and "unusable answer" in error) for error in errors):
            problems.append(f"batch {number}: {errors[0]}")
        spoiled = sum(len(row["rejected"]) for row in of_batch)
        if (one["answers_failed"], one["answers_rejected"]) != (len(errors), spoiled):
            problems.append(f"batch {number}: {len(errors)} failed, {spoiled} unusable, and in the metrics others")
    # Ahead, batches have the groups that were complete first; together they are those that were due first.
    num_cases, asked = len(rows) // GROUP_SIZE, Counter(row["case_id"] for row in rows)
    if asked != Counter({case: GROUP_SIZE * times for case, times in Counter(order[:num_cases]).items()}):
        problems.append(f"{dict(asked)} answers in all, and due were those of the first {num_cases} cases")
    for case, count in asked.items():
        if sorted(row["sample"] for row in rows if row["case_id"] == case) != list(range(count)):
            problems.append(f"{case}: samples are missing")
    if setting.is_lying and not any(row["rejected"] for row in rows):
        problems.append("a lying server was always believed")
    problems += find_training_problems(rows)
    changed = [key for key, identity in saved.items() if key not in answers or _identify(answers[key]) != identity]
    if changed:
        problems.append(f"{len(changed)} of {len(saved)} answers in checkpoints were lost or asked again: {changed[0]}")
    left = [path.name for path in (run / "checkpoints").iterdir() if path.name.startswith(".")]
    left += [path.name for path in (run / "policies").glob("*")]
    if left:
        problems.append(f"left behind: {left}")
    state = json.loads((run / "checkpoints" / "final" / "trainer_state.json").read_text())["loader"]
    if state["position"] != [position]:
        problems.append(f"the last checkpoint is after {state['position']} cases, and {position} were asked")
    return problems


def find_training_problems(rows: Sequence[dict[str, Any]]) -> list[str]:
    """List answers that must not be trained, and rewards and advantages that differ from those recomputed here.

    The reward is the weighted sum of ``arguments_for``, and the advantage (r - mean) / (std + 1e-4) over the answers of
    a group that arrived (arXiv:2402.03300, section 4.1.2), in numpy; groups with equal rewards are not trained.
    """
    import numpy as np

    problems = []
    groups: dict[tuple[int, str, int], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        where = f"batch {row['batch']}: {row['case_id']} {row['sample']}"
        groups[row["batch"], row["case_id"], row["sample"] // GROUP_SIZE].append(row)
        if row["error"] is not None:
            if row["advantage"] is not None or row["ids"]:
                problems.append(f"{where}: failed, and is trained")
            continue
        logprobs = np.array(row["logprobs"], dtype=np.float64)
        ids = np.array(row["ids"])
        if not len(ids) == len(logprobs) <= MAX_NEW_TOKENS or not np.isfinite(logprobs).all() or (logprobs > 0).any():
            problems.append(f"{where}: {len(ids)} ids with log-probabilities {row['logprobs']}")
        if ids.dtype.kind != "i" or (ids < 0).any() or (ids >= VOCAB_SIZE).any():
            problems.append(f"{where}: ids {row['ids']}")
        due = 1.0 * row["parts"]["random"] + 0.5 * row["parts"]["brevity"]
        if not np.isclose(row["reward"], due, rtol=1e-12, atol=1e-12):
            problems.append(f"{where}: reward {row['reward']}, and its parts make {due}")
    for (batch, case, _), group in groups.items():
        arrived = [row for row in group if row["error"] is None]
        rewards = np.array([row["reward"] for row in arrived])
        is_dropped = len(arrived) < 2 or np.ptp(rewards) < 1e-9
        for row in arrived:
            advantage = row["advantage"]
            if is_dropped:
                is_right = advantage is None
            else:
                due = (row["reward"] - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
                is_right = advantage is not None and np.isclose(advantage, due, rtol=1e-9, atol=1e-12)
            if not is_right:
                problems.append(f"batch {batch}: {case} {row['sample']}: advantage {advantage} of {rewards.tolist()}")
    return problems


def _order_cases() -> list[str]:
    """Return the cases in the order in which a run asks them, over some passes."""
    from fctune.data.loader import shuffled
    from fctune.tasks.sampling.task_sets import load_training_suite

    ids = [case.id for case in load_training_suite(CASES).cases]
    return [ids[index] for epoch in range(20) for index in shuffled(len(ids), SEED, epoch)]


def find_differences(run: Path, other: Path, is_exact: bool, has_same_answers: bool = True) -> list[str]:
    """List differences from another run: losses, weights and answers.

    Args:
        run: Directory of the run.
        other: Directory of the other.
        is_exact: Compare bit by bit; otherwise to 1e-9, as numbers of ranks differ.
        has_same_answers: Compare the logs of answers, too.
    """
    tolerance = 0.0 if is_exact else 1e-9
    found = []
    for one, two in zip(read_metrics(run), read_metrics(other), strict=True):
        for key in ("loss", "grad_norm", "lr"):
            if not math.isclose(one[key], two[key], rel_tol=tolerance, abs_tol=tolerance):
                found.append(f"step {one['step']}: {key} {one[key]!r} and {two[key]!r}")
    weights, expected = final_weights(run), final_weights(other)
    for name, weight in weights.items():
        if (gap := float((weight - expected[name]).abs().max())) > tolerance:
            found.append(f"{name}: off by {gap}")
    if has_same_answers:
        names = ("batch", "step", "case_id", "sample", "version", "ids", "reward")
        names += ("logprobs", "advantage") if is_exact else ()
        logs = [[[row[name] for name in names] for row in read_answers(folder)] for folder in (run, other)]
        if logs[0] != logs[1]:
            found.append(f"{sum(a != b for a, b in zip(*logs, strict=False))} answers differ")
    return found


def make_replay_recipe() -> Any:
    """Return a recipe that trains on the answers in the log ``../log.jsonl`` of its run, and generates none."""
    from fctune.tasks.rollouts import Rollout
    from fctune.tasks.sampling.collection import RolloutBatch
    from fctune.training.planned_run import PlannedRun
    from fctune.training.rollout_source import RolloutSource
    from recipes.lora_grpo_distributed import LoRAPolicyRecipe

    class ReplaySource(RolloutSource):
        def _next_batch(self, number: int, step: int) -> RolloutBatch:
            text = (self._log.parent.parent / "log.jsonl").read_text()
            rows = [row for row in map(json.loads, text.splitlines()) if row["batch"] == number]
            prompts = self._tasks._prompts  # type: ignore[attr-defined]
            batch = RolloutBatch(number, (0,), (0,))
            for first in range(0, len(rows), GROUP_SIZE):
                group = [
                    Rollout.from_json(row | {"prompt_ids": prompts[row["case_id"]]})
                    for row in rows[first : first + GROUP_SIZE]
                ]
                (batch.dropped if self._collector._is_dropped(group) else batch.groups).append(group)
            return batch

    class ReplayRecipe(LoRAPolicyRecipe):
        def open_source(self, planned: PlannedRun) -> RolloutSource:
            tasks, order, make_bounds = planned.data.tasks, planned.data.order, planned.model.make_bounds
            return ReplaySource(
                *(planned.config, tasks, order, None, self.world, make_bounds, lambda version: None),
                log=self.run.directory.rollouts,
                num_steps=planned.num_steps,
            )

    return ReplayRecipe


@contextmanager
def outage(server: StandInServer, after_s: float | None) -> Iterator[threading.Event]:
    """Lose the server some time after the block begins; yields an event that is set if it was lost within it."""
    lost, ended = threading.Event(), threading.Event()

    def wait() -> None:
        if not ended.wait(after_s):
            lost.set()
            server.lose()

    thread = threading.Thread(target=wait)
    if after_s is not None:
        thread.start()
    try:
        yield lost
    finally:
        ended.set()
        if after_s is not None:
            thread.join()


class PolicySoak:
    """Trials, counts of what was interrupted where, and references.

    Args:
        seed: Chooses settings, numbers of ranks and faults.
        folder: An empty directory.
    """

    def __init__(self, seed: int, folder: Path):
        self._rng, self._folder = random.Random(seed), folder
        self.model, _ = make_inputs(folder)
        self.server = StandInServer(self.model)
        self.liar = StandInServer(self.model, is_lying=True)
        self.hits = Counter[str]()
        self._aims = Counter[str]()  # phases that faults were meant for
        self._references: dict[tuple[Setting, int], Path] = {}

    @property
    def num_kills(self) -> int:
        """Kills of ranks so far; losses of the server are not counted."""
        return sum(count for phase, count in self.hits.items() if phase != OUTAGE)

    def run_trial(self, number: int, setting: Setting, num_kills: int) -> list[str]:
        """Interrupt a run until it completes, for at most ``num_kills`` kills in all; returns what is wrong with it."""
        run, saved = self._folder / f"run-{number}", dict[Key, Any]()
        sizes = self._rng.choice(((1,), (2,), (1, 2)))
        used, resumed = set[int](), list[int]()
        num_left = self._rng.randint(3, 6)
        while True:
            world_size = self._rng.choice(sizes)
            used.add(world_size)
            is_last = self.num_kills >= num_kills or num_left == 0
            fault = None if is_last else self._choose_fault(run, setting, world_size)
            # A run that has not begun refuses a server that is not there.
            is_outage = not is_last and setting.engine == "server" and has_checkpoint(run) and self._rng.random() < 0.4
            server = self.liar if setting.is_lying else self.server
            with outage(server, self._rng.uniform(1.0, 6.0) if is_outage else None) as lost:
                arguments = arguments_for(run, self.model, setting, server.url)
                ended = run_group(arguments, world_size, fault, limit_s=LIMIT_S)
            self._count(ended, lost.is_set(), f"run {number} ({setting}), {world_size} ranks")
            num_left -= 1
            saved |= read_saved_answers(run)
            if all(code == 0 for code in ended.codes):
                break
            if not ended.fired:
                return [f"ended without a fault: {ended.codes}\n{ended.output[-3000:]}"]
        problems = find_record_problems(run, setting, saved)
        is_exact = len(used) == 1
        world_size = max(used)
        replay = self._folder / f"replay-{number}" / "run"
        replay.parent.mkdir()
        shutil.copyfile(run / "rollouts.jsonl", replay.parent / "log.jsonl")
        replayed = dataclasses.replace(setting, engine="in_process", staleness=0, is_lying=False)
        ended = run_group(
            arguments_for(replay, self.model, replayed, ""), world_size, make_recipe=make_replay_recipe, limit_s=LIMIT_S
        )
        if any(ended.codes):
            return [*problems, f"the replay ended with {ended.codes}\n{ended.output[-3000:]}"]
        problems += [f"replay: {one}" for one in find_differences(run, replay, is_exact)]
        if setting.is_repeatable:
            problems += find_differences(run, self._refer(setting, world_size), is_exact)
        resumed = [one["step"] for one in json.loads((run / "run.json").read_text()).get("resumed", [])]
        print(
            f"run {number} ({setting}): resumed after {resumed}, {len(saved)} answers from checkpoints, "
            f"{len(read_answers(run))} in all, compared {'bit by bit' if is_exact else 'to 1e-9'}: "
            f"{'; '.join(problems) or 'nothing lost, nothing twice'}",
            flush=True,
        )
        for moved in (replay.parent, *self._folder.glob(f"run-{number}*")):
            shutil.rmtree(moved)
        return problems

    def _choose_fault(self, run: Path, setting: Setting, world_size: int) -> Fault:
        phases = [one for one in PHASES[setting.engine] if has_checkpoint(run) or one not in ("read", "prune")]
        phase = min(phases, key=lambda one: (self.hits[one], self._aims[one], self._rng.random()))
        self._aims[phase] += 1
        is_of_rank_0 = phase in ("publish", "mark", "prune", "load", "log")
        is_of_rank_0 |= setting.engine == "server" and phase in ("sample", "judge")
        rank = 0 if is_of_rank_0 else self._rng.randrange(world_size)
        count = self._rng.randint(
            1, {"judge": 9, "prune": 1, "read": 1, "mark": 2, "publish": 2, "stage": 2}.get(phase, 3)
        )
        delay_s = self._rng.choice((0.0, self._rng.uniform(0.0, 0.3)))
        return Fault("kill", phase, rank, count, delay_s)

    def _count(self, ended: Ended, is_lost: bool, where: str) -> None:
        for is_hit, phase in ((ended.fired, ended.phase), (is_lost, OUTAGE)):
            if is_hit and phase is not None:
                self.hits[phase] += 1
                print(f"kill {self.num_kills}: {where}, {phase}", flush=True)

    def _refer(self, setting: Setting, world_size: int) -> Path:
        """Return an uninterrupted run."""
        found = self._references.get((setting, world_size))
        if found is None:
            found = self._references[setting, world_size] = self._folder / f"reference-{len(self._references)}"
            server = self.liar if setting.is_lying else self.server
            arguments = arguments_for(found, self.model, setting, server.url)
            ended = run_group(arguments, world_size, limit_s=LIMIT_S)
            assert not any(ended.codes), ended.output
        return found


def soak_policies(num_kills: int, seed: int, folder: Path, settings: Sequence[Setting] = SETTINGS) -> int:
    """Kill runs of reinforcement until ``num_kills`` ranks were killed; returns the number of wrong runs."""
    soak = PolicySoak(seed, folder)
    wrong = number = 0
    try:
        while soak.num_kills < num_kills:
            setting = settings[number % len(settings)]
            number += 1
            if problems := soak.run_trial(number, setting, num_kills):
                wrong += 1
                print("\n".join(problems), flush=True)
    finally:
        soak.server.stop()
        soak.liar.stop()
    for part, phases in PARTS.items():
        of_part = {phase: soak.hits[phase] for phase in phases if soak.hits[phase]}
        print(f"{part}: {sum(of_part.values())} {of_part if len(phases) > 1 else ''}")
    print(f"{soak.num_kills} kills and {soak.hits[OUTAGE]} lost servers in {number} runs; {wrong} runs were wrong")
    return wrong
