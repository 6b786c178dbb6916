"""Graphs, kernels and bytes of a compiled block, as torch's compiler counts them, without a GPU.

Dynamo and Inductor run on tensors without memory; of the code that Inductor generates, nothing is built or run. It
lowers for the CPU, whose rules of fusion are those of GPUs but for some reductions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
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
        with _without_building(counts):
            compile_fx_inner(graph, inputs, is_backward=is_backward)
        self.graphs.append(counts)
        return make_boxed_func(graph.forward)


@contextmanager
def _without_building(counts: dict[str, int]) -> Iterator[None]:
    """Build none of the generated code, and count the kernels that it has."""
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode, Scheduler

    generate = Scheduler.codegen

    def codegen(self: Any) -> Any:
        external = [node for node in self.nodes if isinstance(node, ExternKernelSchedulerNode)]
        nothing = (ExternKernelSchedulerNode, NopKernelSchedulerNode)
        fused = [node for node in self.nodes if not isinstance(node, nothing)]
        counts["kernels"] = len(fused)
        counts["kernel bytes"] = sum(node.get_read_write_buffers_sizes() for node in fused)
        counts["products"] = sum(_is_product(node) for node in external)
        counts["product bytes"] = sum(node.get_read_write_buffers_sizes() for node in external if _is_product(node))
        return generate(self)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Scheduler, "codegen", codegen))
        for name in ("cpp", "cpp_pybinding"):
            stack.enter_context(mock.patch.object(AsyncCompile, name, return_value=lambda *_: None))
        stack.enter_context(config.patch(fx_graph_cache=False, cpp_wrapper=False))
        yield


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
