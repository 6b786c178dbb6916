"""Criteria by which a run is judged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fctune.config.fields import AT_LEAST_1, SHARE, Null, Range

_NO_CRITERION = Null("no criterion")


@dataclass(kw_only=True, slots=True)
class SuccessConfig:
    """Criteria that are judged at the end of a run as PASS, FAIL or not measured; `success: {}` uses these defaults."""

    min_accuracy: Annotated[float | None, SHARE, _NO_CRITERION] = 0.85
    """Tool-call accuracy on held-out cases."""
    max_final_loss: Annotated[float | None, _NO_CRITERION] = None
    """Final training loss, which depends on the data: take it from an earlier run on the same rows."""
    min_gpu_utilization: Annotated[float | None, SHARE, _NO_CRITERION] = 0.85
    """Mean utilisation of the GPUs."""
    min_memory_share: Annotated[float | None, SHARE, _NO_CRITERION] = 0.7
    """Least peak memory, as a share of a GPU's memory."""
    max_memory_share: Annotated[float | None, SHARE, _NO_CRITERION] = 0.8
    """Greatest peak memory, as a share of a GPU's memory."""
    min_planned_speed: Annotated[float | None, Range(gt=0), _NO_CRITERION] = 0.7
    """Training throughput in tokens/s per GPU, as a share of the plan's for this model, data and GPU; the plan's range
    ends at 0.71. Not measured on a CPU, on an unknown GPU, and for models of less than a billion parameters."""
    min_tokens_per_s_per_gpu: Annotated[float | None, _NO_CRITERION] = None
    """Training throughput in tokens/s per GPU; not measured on a CPU."""
    min_scaling: Annotated[float | None, _NO_CRITERION] = 0.9
    """Tokens/s per GPU relative to a run on fewer GPUs."""
    no_out_of_memory: bool = True
    """No out-of-memory error."""
    trainable_parameters: Annotated[int | None, AT_LEAST_1, _NO_CRITERION] = None
    """Exact number of trainable parameters, without the rows of tokens that train besides adapters."""
    max_model_gb: Annotated[float | None, Range(gt=0), _NO_CRITERION] = None
    """Greatest size of the exported merged model in GB."""
    loss_decreases: bool = True
    """Steady decrease: the mean loss of each quarter of the run is at most 2% above the quarter before, and of the last
    below the first."""
    final_checkpoint: bool = True
    """The checkpoint of the last step is complete."""
    min_inference_tokens_per_s: Annotated[float | None, _NO_CRITERION] = 100.0
    """Inference speed in tokens/s."""
