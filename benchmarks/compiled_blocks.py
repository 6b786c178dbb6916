"""Graphs, kernels and bytes of a compiled block, as torch's compiler counts them, without a GPU.

Dynamo traces on tensors without memory, for the CPU; Inductor then lowers and fuses the graphs for an H100. It stops
before it generates code, so neither a GPU nor Triton is needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves
from torchtune.models.llama3_1._position_embeddings import Llama3ScaledRoPE

from fctune.config.schema import RunConfig
from fctune.config.sections.adapter import AdapterConfig
from fctune.models.architecture import Architecture
from fctune.models.attention import make_bounds
from fctune.models.causal_lm import materialize_
from fctune.models.lora import apply_lora_
from fctune.models.precision import PrecisionPolicy
from fctune.models.sources import build_model
from fctune.parallel.activations import apply_activation_checkpointing_, compile_blocks_

_GPU = torch.device("cuda", 0)
_H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65_536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    total_memory=80 * 2**30,
    shared_memory_per_block=48 * 2**10,
    shared_memory_per_block_optin=227 * 2**10,
    shared_memory_per_multiprocessor=228 * 2**10,
    L2_cache_size=50 * 2**20,
    gcnArchName="",
)


class Counter:
    """Compiler backend that lowers graphs by Inductor, counts what comes out, and runs them uncompiled."""

    def __init__(self) -> None:
        self.graphs: list[dict[str, int]] = []

    def backend(self) -> Callable[..., Any]:
        """Return the backend for ``torch.compile``."""
        from torch._dynamo.backends.common import aot_autograd

        compiler = {
            f"{name}_compiler": functools.partial(self._compile, is_backward=name == "bw") for name in ("fw", "bw")
        }
        from torch._functorch.partitioners import min_cut_rematerialization_partition
        from torch._inductor.decomposition import select_decomp_table

        partition = functools.partial(min_cut_rematerialization_partition, compiler="inductor")
        backend: Callable[..., Any] = aot_autograd(
            **compiler, decompositions=select_decomp_table(), partition_fn=partition
        )
        return backend

    def _compile(self, graph: torch.fx.GraphModule, inputs: Any, is_backward: bool) -> Any:
        from functorch.compile import make_boxed_func
        from torch._inductor.compile_fx import compile_fx_inner

        counts: dict[str, int] = {}
        with _lowered_for_gpu(counts), suppress(_CountedError):
            compile_fx_inner(graph, inputs, is_backward=is_backward)
        assert counts, "Inductor's scheduler did not generate code"
        self.graphs.append(counts)
        return make_boxed_func(graph.forward)


class _CountedError(BaseException):
    """Ends a compilation whose kernels are counted; nothing on the way catches it."""


@contextmanager
def _lowered_for_gpu(counts: dict[str, int]) -> Iterator[None]:
    """Lower graphs that were traced on the CPU as if their tensors were on an H100, and count their kernels."""
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import compile_fx, config, scheduler
    from torch._inductor.graph import GraphLowering
    from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode, Scheduler

    moved: list[FakeTensor] = []
    created: list[tuple[torch.fx.Node, dict[str, Any]]] = []
    prepare = GraphLowering.__init__

    def init(self: Any, graph: torch.fx.GraphModule, example_inputs: Any = None, **options: Any) -> None:
        for node in graph.graph.nodes:
            if node.op == "get_attr":
                value = getattr(graph, node.target)
                if isinstance(value, torch.Tensor):
                    moved.extend(_move_to_gpu_(value))
            moved.extend(_move_to_gpu_(node.meta.get("val")))
            if node.kwargs.get("device") == torch.device("cpu"):
                created.append((node, node.kwargs))
                node.kwargs = {**node.kwargs, "device": _GPU}
        moved.extend(_move_to_gpu_(example_inputs))
        prepare(self, graph, example_inputs, **options)

    def codegen(self: Any) -> None:
        external = [node for node in self.nodes if isinstance(node, ExternKernelSchedulerNode)]
        nothing = (ExternKernelSchedulerNode, NopKernelSchedulerNode)
        fused = [node for node in self.nodes if not isinstance(node, nothing)]
        counts["kernels"] = len(fused)
        counts["kernel bytes"] = sum(node.get_read_write_buffers_sizes() for node in fused)
        counts["products"] = sum(_is_product(node) for node in external)
        counts["product bytes"] = sum(node.get_read_write_buffers_sizes() for node in external if _is_product(node))
        raise _CountedError

    with ExitStack() as stack:
        for owner, name, value in (
            (GraphLowering, "__init__", init),
            (compile_fx, "_check_triton_bf16_support", lambda *_: None),
            (Scheduler, "codegen", codegen),
            (scheduler, "has_triton", lambda *_: True),
            (torch.cuda, "get_device_properties", lambda *_: _H100),
            (torch.cuda, "get_device_capability", lambda *_: (9, 0)),
            (torch.cuda, "current_device", lambda: 0),
            (torch.cuda, "_lazy_init", lambda: None),
            (CudaInterface, "get_compute_capability", staticmethod(lambda *_: 90)),
            (CudaInterface, "get_device_properties", staticmethod(lambda *_: _H100)),
            (CudaInterface, "is_available", staticmethod(lambda: True)),
            (CudaInterface.Worker, "get_device_properties", staticmethod(lambda *_: _H100)),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(config.patch(fx_graph_cache=False, cpp_wrapper=False))
        try:
            yield
        finally:  # AOT autograd traces on with the tensors, and the graphs run on the CPU
            for tensor in moved:
                tensor.fake_device = torch.device("cpu")
            for node, kwargs in created:
                node.kwargs = kwargs


def _move_to_gpu_(values: Any) -> list[FakeTensor]:
    """Make tensors without memory those of the GPU, in place; numbers in tensors may stay on the CPU."""
    found = [t for t in tree_leaves(values) if isinstance(t, FakeTensor) and t.dim() and t.device.type == "cpu"]
    for tensor in found:
        tensor.fake_device = _GPU
    return found


def _is_product(node: Any) -> bool:
    return any(name in str(getattr(node.node, "python_kernel_name", "")) for name in ("mm", "_mkl", "mkldnn"))


@contextmanager
def _counting(counter: Counter) -> Iterator[None]:
    """Trace and lower by a counter whatever is compiled, on tensors without memory."""
    compiler = functools.partial(torch.compile, backend=counter.backend())
    torch._dynamo.reset()
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(mock.patch.object(torch, "compile", compiler))
        # It reads values.
        stack.enter_context(
            mock.patch.object(Llama3ScaledRoPE, "apply_scaling", lambda self, frequencies, *_: frequencies)
        )
        yield
    torch._dynamo.reset()


def count_compiled_layer(architecture: Architecture, adapter: AdapterConfig, tokens: int) -> dict[str, Any]:
    """Return the graphs of a model's layers, and the counts of ``forward`` and ``backward`` of the first graph of each.

    The layers run in their model, which computes positions and masks as for training. Bytes are per token; gradients
    reach the input of the layer, as in all layers but the first.
    """
    counter = Counter()
    model = build_model(architecture, tokens, PrecisionPolicy.uniform(torch.bfloat16))
    apply_lora_(model, adapter)
    with _counting(counter):
        materialize_(model, torch.device("cpu"))
        compile_blocks_(model)
        model.train().token_keys.set_rows(torch.empty(1, dtype=torch.int64), tokens)
        embedding = next(module for module in model.modules() if isinstance(module, torch.nn.Embedding))
        embedding.register_forward_hook(lambda module, inputs, output: output.requires_grad_())
        zeros = torch.zeros(1, tokens, dtype=torch.int64)
        model.hidden_states(zeros, zeros, make_bounds([[tokens]], "per_document")).sum().backward()
    graphs = [
        {key: round(value / tokens) if "bytes" in key else value for key, value in graph.items()}
        for graph in counter.graphs
    ]
    return {"graphs": len(graphs), "forward": graphs[0], "backward": graphs[-1]}


def count_compiled_block(config: RunConfig, architecture: Architecture, tokens: int) -> dict[str, float]:
    """Return a block's graphs, and the kernels, products and bytes per token of a forward and backward pass.

    A second pass over other conversations must add no graphs.
    """
    counter = Counter()
    model = build_model(architecture, config.data.row_tokens, PrecisionPolicy.uniform(torch.bfloat16))
    if config.adapter is not None:
        apply_lora_(model, config.adapter)
    apply_activation_checkpointing_(
        model, config.activation_checkpointing, "cpu", config.activation_checkpointing.fraction or 0.0
    )
    with _counting(counter):
        materialize_(model, torch.device("cpu"))
        compile_blocks_(model)
        model.train().token_keys.set_rows(torch.empty(1, dtype=torch.int64), tokens)
        positions = torch.zeros(1, tokens, dtype=torch.int64)
        numbers: list[int] = []
        for lengths in ([tokens, 0], [tokens // 4, tokens - tokens // 4]):
            hidden = torch.empty(1, tokens, architecture.embed_dim, dtype=torch.bfloat16, requires_grad=True)
            block = next(iter(model.blocks))
            out = block(hidden, mask=make_bounds([lengths], "per_document"), input_pos=positions)
            out.sum().backward()
            numbers.append(len(counter.graphs))
    total = {key: sum(graph[key] for graph in counter.graphs) for key in counter.graphs[0]}
    per_token: dict[str, Any] = {
        key: round(value / tokens) if "bytes" in key else value for key, value in total.items()
    }
    return {"graphs": numbers[0], "graphs after other conversations": numbers[1]} | per_token
