"""Checks of one architecture from checkpoint to export, compared with transformers and PEFT.

Everything is computed in float32 on the CPU. Both sides read the same checkpoint and see the same conversations: ours
packed, theirs one by one.
"""

from __future__ import annotations

import functools
import logging
import math
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor

from benchmarks.model_references import count_parameters, iter_conversations, load_reference, train_reference
from benchmarks.model_runs import NUM_STEPS, Recorder, link_name, load, make_run
from benchmarks.model_zoo import Entry, save_config, save_weights
from fctune.base.distributed import World
from fctune.base.errors import ConfigError
from fctune.checkpoint.hf_checkpoint import HFAdapterWeights, HFModelWeights
from fctune.checkpoint.resume import RunFacts, choose_checkpoint
from fctune.checkpoint.state import Checkpointer
from fctune.checkpoint.store import CheckpointStore
from fctune.config.schema import RunConfig
from fctune.data.loader import Batch, GlobalLoader
from fctune.data.prepared_set import open_prepared
from fctune.models.architecture import ALL_LINEAR
from fctune.models.causal_lm import CausalLM
from fctune.models.export import export_adapter, export_merged
from fctune.models.hub import WEIGHT_FILES, digest_model
from fctune.models.lora import adapters_off, apply_lora_
from fctune.models.packing_proof import prove_packing
from fctune.models.planned_model import find_architecture, shape_model
from fctune.runs.sinks import SinkGroup
from fctune.training.callbacks.checkpoint import CheckpointCallback
from fctune.training.loop import build_loader, train
from fctune.training.setup import build_base, start_state

_SAVED_STEP = 3
_RANK_STEPS = 3
LOSS_TOLERANCE = 1e-4  # difference of losses, in nats
_LOGIT_TOLERANCE = 1e-3  # difference of logits, as a share of the largest


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a check: whether it passed, and what was measured or went wrong."""

    passed: bool
    note: str
    seconds: float = 0.0


class Bench:
    """The checks of one architecture, with their shared state.

    Args:
        entry: The architecture.
        folder: Empty folder for its checkpoints.
        sets: Folder of ``prepare_sets``.
        world: This rank, the only one.
    """

    def __init__(self, entry: Entry, folder: Path, sets: Path, world: World):
        self.entry, self.folder, self.sets, self.world = entry, folder, sets, world
        self.model_dir = folder / "model"
        self.is_packed = True
        self.kind = ""
        self.refused: str | None = None  # why the model cannot be built
        self.losses: dict[str, list[float]] = {}
        self.models: dict[str, CausalLM] = {}

    def config(self, name: str, **changes: Any) -> RunConfig:
        """Return the config of a run: ``lora`` or ``full``."""
        modules = ALL_LINEAR if name == "lora" else None
        return make_run(self.model_dir, self.folder / name, modules, self.is_packed, **changes)

    def loader(self, config: RunConfig) -> GlobalLoader:
        """Return the loader of the run's prepared set."""
        return build_loader(config, open_prepared(self.sets / link_name(config.data.packed)))

    def build(self) -> str:
        """Build the model with its adapters, of a directory that has no weights."""
        save_config(self.entry, self.model_dir)
        config = self.config("lora")
        assert config.adapter is not None
        try:
            model = build_base(config, self.model_dir, self.world)
        except ConfigError as error:
            self.refused = str(error).replace(f"{self.model_dir / 'config.json'}: ", "")
            raise
        apply_lora_(model, config.adapter)
        has_experts = any(".experts." in name for name, _ in model.named_parameters())
        is_sparse = has_experts or bool(model.architecture.expert_names)
        has_state = bool(model.state_layers)
        self.kind = f"{'hybrid' if has_state else ''}{', ' if is_sparse and has_state else ''}"
        self.kind = self.kind + "mixture of experts" if is_sparse else self.kind or "dense"
        return type(model.architecture).__module__.split(".")[2]

    @torch.no_grad()
    def pack(self) -> str:
        """Compare the logits of packed rows with transformers' of each conversation alone."""
        save_weights(self.model_dir)
        config = self.config("full")
        model = load(config, self.world)[0].eval()
        try:
            prove_packing(model, self.world.device, config.data.row_tokens)
        except ConfigError as error:
            check("data.packed" in str(error), str(error))
            self.is_packed = False
        config = self.config("full")
        reference = load_reference(self.model_dir)
        loader = self.loader(config)
        (batch,) = loader.micro_batches(loader.step_at(1), 0, 1, 8)
        bounds = None if batch.lengths is None else model.make_bounds(batch.lengths)
        logits = model(batch.tokens, positions=batch.positions, bounds=bounds)
        worst = 0.0
        for row, start, stop in iter_conversations(batch):
            alone = reference(input_ids=batch.tokens[row : row + 1, start:stop], use_cache=False).logits[0]
            worst = max(worst, relative(logits[row, start:stop], alone))
        check(worst <= _LOGIT_TOLERANCE, f"logits differ by {worst:.1e} of the largest")
        return f"{worst:.0e}" if self.is_packed else f"one conversation a row, {worst:.0e}"

    def train(self, name: str) -> str:
        """Take some steps with ``lora`` or of all weights, saving on the way, and compare the losses."""
        config = self.config(name, checkpoint={"every": 0, "async_save": False})
        model, state, recorder, callback = self._start(name, config)
        self.models[name] = model
        loader = self.loader(config)
        reference = load_reference(self.model_dir)
        if config.adapter is not None:
            from peft import PeftModel

            start = self.folder / "start"
            export_adapter(model, config.adapter, str(self.model_dir), self.model_dir, start, is_writer=True)
            reference = PeftModel.from_pretrained(reference, start, is_trainable=True)
            ours = sum(p.numel() for p in model.parameters() if p.requires_grad)
            theirs = sum(p.numel() for p in reference.parameters() if p.requires_grad)
            check(ours == theirs, f"{ours:,} trained parameters, PEFT has {theirs:,}")
        expected = train_reference(reference, config, loader, NUM_STEPS)
        kind: Literal["sharded", "elastic"] = "sharded" if name == "lora" else "elastic"
        train(config, state, loader, _SAVED_STEP, self.world, SinkGroup(recorder), [callback])
        callback.save(kind, _SAVED_STEP)
        callback.saver.finish()
        train(config, state, loader, NUM_STEPS, self.world, SinkGroup(recorder), [callback])
        callback.close()
        self.losses[name] = recorder.losses
        change = abs(expected[0] - expected[-1])
        check(change > 10 * LOSS_TOLERANCE, f"the losses hardly change: {expected}")
        worst = max(abs(a - b) for a, b in zip(recorder.losses, expected, strict=True))
        check(worst <= LOSS_TOLERANCE, f"losses differ by {worst:.1e}")
        return f"{worst:.0e}"

    def resume(self) -> str:
        """Resume both runs from their checkpoints and compare losses and weights bit by bit."""
        for name, trained in self.models.items():
            config = self.config(name, checkpoint={"every": 0, "async_save": False})
            model, state, recorder, callback = self._start(name, config)
            found, _ = choose_checkpoint("auto", CheckpointStore(self.folder / name / "checkpoints"), self.world)
            assert found is not None
            callback.checkpointer.restore_(found)
            train(config, state, self.loader(config), NUM_STEPS, self.world, SinkGroup(recorder), [callback])
            callback.close()
            check(recorder.losses == self.losses[name][_SAVED_STEP:], f"losses of the {name} run differ")
            expected = dict(trained.named_parameters())
            wrong = [key for key, value in model.named_parameters() if not torch.equal(value, expected[key])]
            check(not wrong, f"{len(wrong)} weights of the {name} run differ, such as {wrong[:1]}")
        return "same bits"

    @torch.no_grad()
    def export(self) -> str:
        """Export both trained models and compare the logits that transformers and PEFT compute."""
        from peft import PeftModel

        check(set(self.models) == {"lora", "full"}, "training failed")
        tokens = torch.randint(3, 1300, (1, 40), generator=torch.Generator().manual_seed(3))
        worst = 0.0
        for name, model in self.models.items():
            out, config = self.folder / name / "merged", self.config(name)
            export_merged(model, self.model_dir, out, is_writer=True)
            check(read_shapes(out) == read_shapes(self.model_dir), "the tensors are not those of the base")
            ours = model.eval()(tokens)[0]
            worst = max(worst, relative(ours, load_reference(out)(input_ids=tokens, use_cache=False).logits[0]))
            if config.adapter is not None:
                adapter = self.folder / name / "adapter"
                export_adapter(model, config.adapter, str(self.model_dir), self.model_dir, adapter, is_writer=True)
                adapted = PeftModel.from_pretrained(load_reference(self.model_dir), adapter).eval()
                worst = max(worst, relative(ours, adapted(input_ids=tokens, use_cache=False).logits[0]))
        check(worst <= _LOGIT_TOLERANCE, f"logits differ by {worst:.1e} of the largest")
        return f"{worst:.0e}"

    def plan(self) -> str:
        """Compare the planner's number of parameters of the family's real model with transformers' meta model."""
        real = self.folder / "real"
        save_config(self.entry, real, "real")
        config = make_run(real, self.folder / "planned", None, True)
        architecture, _, _ = find_architecture(config.model.path)
        planned = sum(p.numel() for p in shape_model(config, architecture).parameters())
        expected = count_parameters(real)
        check(planned == expected, f"{planned:,} planned, transformers has {expected:,}")
        return f"{expected:,}"

    def compile(self) -> str:
        """Train the model at its real depth with compiled blocks, half of them checkpointed, and count the graphs."""
        from torch._dynamo.utils import counters

        deep = self.folder / "deep"
        save_config(self.entry, deep, "deep")
        save_weights(deep)
        changes: dict[str, Any] = {"compile": True, "activation_checkpointing": {"fraction": 0.5}}
        config = make_run(deep, self.folder / "compiled", ALL_LINEAR, self.is_packed, **changes)
        graphs: list[Any] = []

        def count(graph: Any, inputs: Any) -> Callable[..., Any]:
            graphs.append(graph)
            return graph.forward  # type: ignore[no-any-return]

        compile_, torch.compile = torch.compile, functools.partial(torch.compile, backend=count)
        counters.clear()
        try:
            model = load(config, self.world)[0]
        finally:
            torch.compile = compile_
        loader = self.loader(config)
        batches = [next(iter(loader.micro_batches(loader.step_at(number), 0, 1, 1))) for number in (1, 2)]

        def run(batch: Batch, is_training: bool, has_adapters: bool) -> float:
            model.train(is_training)
            adapters = nullcontext() if has_adapters else adapters_off(model)
            with adapters, torch.set_grad_enabled(is_training):
                bounds = None if batch.lengths is None else model.make_bounds(batch.lengths)
                loss = model(batch.tokens, batch.positions, bounds, batch.labels, batch.loss_weights)
                if is_training:
                    loss.backward()
            return float(loss.detach())

        counts, losses = [], []
        # A step, another layout of conversations, a validation, a pass of the frozen base; then all of them again.
        passes = (
            (batches[0], True, True),
            (batches[1], True, True),
            (batches[0], False, True),
            (batches[0], False, False),
        )
        for _ in range(2):
            for batch, is_training, has_adapters in passes:
                losses.append(run(batch, is_training, has_adapters))
                counts.append(len(graphs))
        with torch.compiler.set_stance("force_eager"):
            expected = run(batches[0], is_training=True, has_adapters=True)
        check(counts[1] == counts[0], f"another layout of conversations is compiled anew: {counts} graphs")
        check(counts[-1] == counts[3], f"graphs are compiled again and again: {counts}")
        check(math.isclose(losses[0], expected, rel_tol=1e-5), f"loss {losses[0]}, uncompiled {expected}")
        num_blocks, num_breaks = len(list(model.blocks)), sum(counters["graph_break"].values())
        breaks = f", {num_breaks} breaks" if num_breaks else ""
        return f"{counts[-1]} graphs{breaks}, {num_blocks} blocks"

    def _start(self, name: str, config: RunConfig) -> tuple[CausalLM, Any, Recorder, CheckpointCallback]:
        """Return the loaded model, its state, a recorder of losses and the checkpointer."""
        model, gradient_sync = load(config, self.world)
        state = start_state(model, config, NUM_STEPS, gradient_sync)
        weights: Any = HFModelWeights(model.architecture, self.model_dir)
        if config.adapter is not None:
            weights = HFAdapterWeights(model.architecture, config.adapter, str(self.model_dir), self.model_dir)
        facts = RunFacts(config.to_dict(), digest_model(self.model_dir, WEIGHT_FILES), NUM_STEPS, {})
        checkpointer = Checkpointer(state, weights, self.loader(config), facts, self.world)
        store = CheckpointStore(self.folder / name / "checkpoints")
        return model, state, Recorder(), CheckpointCallback(config.checkpoint, checkpointer, store, self.world)


CHECKS: dict[str, Callable[[Bench], str]] = {
    "pack": Bench.pack,
    "lora": lambda bench: bench.train("lora"),
    "full": lambda bench: bench.train("full"),
    "resume": Bench.resume,
    "export": Bench.export,
    "plan": Bench.plan,
    "compile": Bench.compile,
}
"""The checks of one process, in their order: each but the last needs those before."""


def check_alone(world: World, entry: Entry, folder: Path, sets: Path, names: Sequence[str]) -> dict[str, Any]:
    """Run checks of one process; returns their outcomes by name, the kind of model, and the losses.

    A model that cannot be built has the reason instead, ``refused``.

    Args:
        world: This rank, the only one.
        entry: The architecture.
        folder: Empty folder for its checkpoints.
        sets: Folder of ``prepare_sets``.
        names: Keys of ``CHECKS``.
    """
    _silence()
    bench = Bench(entry, folder, sets, world)
    outcomes = {"build": _attempt(bench.build)}
    if bench.refused is not None:
        return {"refused": bench.refused}
    if outcomes["build"].passed:
        outcomes |= {name: _attempt(functools.partial(CHECKS[name], bench)) for name in names}
    return {
        "kind": bench.kind,
        "is_packed": bench.is_packed,
        "outcomes": {name: asdict(outcome) for name, outcome in outcomes.items()},
        "losses": bench.losses,
    }


def _attempt(run: Callable[[], str]) -> Outcome:
    """Run a check; an exception becomes its outcome."""
    started = time.perf_counter()
    try:
        is_passed, note = True, run()
    except Exception as error:
        is_passed, note = False, _describe(error)
    return Outcome(is_passed, note, round(time.perf_counter() - started, 2))


def _describe(error: Exception) -> str:
    if isinstance(error, (AssertionError, ConfigError)):
        return str(error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]} ({Path(place.filename).name}:{place.lineno})"


def train_on_ranks(world: World, entry: Entry, folder: Path, sets: Path, is_packed: bool) -> dict[str, list[float]]:
    """Return the losses of both runs on several ranks: adapters by DDP, all weights by FSDP."""
    _silence()
    losses = {}
    for name, mode in (("lora", "ddp"), ("full", "fsdp")):
        output = folder / f"{name}_on_ranks"
        modules = ALL_LINEAR if name == "lora" else None
        config = make_run(folder / "model", output, modules, is_packed, parallel={"mode": mode})
        model, gradient_sync = load(config, world)
        recorder, state = Recorder(), start_state(model, config, NUM_STEPS, gradient_sync)
        loader = build_loader(config, open_prepared(sets / link_name(is_packed)))
        train(config, state, loader, _RANK_STEPS, world, SinkGroup(recorder))
        losses[name] = recorder.losses
    return losses


def read_shapes(folder: Path) -> dict[str, tuple[list[int], str]]:
    """Return shape and dtype of every tensor of a model directory."""
    shapes: dict[str, tuple[list[int], str]] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                tensor = opened.get_slice(name)
                shapes[name] = (tensor.get_shape(), tensor.get_dtype())
    return shapes


def relative(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference, as a share of the largest value; infinite if one is not finite."""
    difference = float((ours - theirs).abs().max() / theirs.abs().max())
    return difference if math.isfinite(difference) else math.inf


def check(is_true: bool, problem: str) -> None:
    """Raise an error unless a condition holds."""
    if not is_true:
        raise AssertionError(problem)


def _silence() -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("fctune").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
