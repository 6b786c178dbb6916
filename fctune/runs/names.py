"""Registry of a run's metrics: name, unit, description and how each is counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["number", "flag", "text"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric, under the name that ``metrics.jsonl`` and all other sinks use."""

    name: str
    unit: str
    description: str
    convention: str = ""  # ranks and steps it covers, and what is counted
    kind: Kind = "number"  # a flag is present only in the steps in which it is true

    @property
    def prometheus(self) -> str:
        """Name at the Prometheus endpoint, where the suffix ``_total`` is reserved for counters."""
        return "fctune_" + self.name.removesuffix("_total").replace("/*", "_by_category")


_EACH = "this step, all ranks"
_PAIRS = "mean over the step's preference pairs, all ranks, before the update"
_VALIDATION_PAIRS = "on the validation split, in steps with a validation"
_ROLLOUTS = "mean over the answers of the step's batch, all ranks"
_GENERATED = "mean over the step's generated tokens, all ranks, before the update"
_DISTILLED = "mean over the step's supervised tokens, all ranks; 0 of a teacher in process"
_INTERVAL = "since the previous line that has it (log_every_n_steps)"
_WILSON = "95 % interval by Wilson's method"
_RATE = "share of held-out cases, in steps with an evaluation"

METRICS = (
    Metric("step", "steps", "optimizer steps taken", "from 1, counted across restarts"),
    Metric("epoch", "epochs", "epoch of the step's last pack", "as the loader counts, from 0"),
    Metric(
        "loss",
        "nats/token",
        "weighted mean cross entropy of supervised tokens; in preference training the mean loss of pairs, in nats; in "
        "reinforcement learning the policy loss, without unit; in distillation the mean divergence from the teacher",
        _EACH + ", before the update",
    ),
    Metric("reward_accuracy", "share", "pairs whose chosen answer has the higher reward", _PAIRS),
    Metric("reward_margin", "", "reward of the chosen answer minus that of the rejected one", _PAIRS),
    Metric("reward_chosen", "", "beta * log-probability of the chosen answer, relative to the reference", _PAIRS),
    Metric("reward_rejected", "", "beta * log-probability of the rejected answer, relative to the reference", _PAIRS),
    Metric("logps_chosen", "nats", "log-probability of the chosen answer", _PAIRS),
    Metric("logps_rejected", "nats", "log-probability of the rejected answer", _PAIRS),
    Metric("sft_loss", "nats/token", "mean cross entropy of the chosen answers' supervised tokens", _EACH),
    Metric("reward_mean", "", "reward of an answer", _ROLLOUTS),
    Metric("reward/*", "share", "part of the reward, before its weight", _ROLLOUTS + "; * is the part"),
    Metric("pass_rate", "share", "answers whose strict verdict is right", _ROLLOUTS),
    Metric("pass_rate/*", "share", "pass_rate of one category", _ROLLOUTS + "; * is the category"),
    Metric("answer_tokens_mean", "tokens", "generated tokens of an answer", _ROLLOUTS),
    Metric("answers", "answers", "answers of the batch", "all ranks, with those of dropped groups"),
    Metric("answers_trained", "answers", "answers that the step trains", "all ranks"),
    Metric("sequences_trained", "sequences", "sequences of these answers", "all ranks; with agents that need several"),
    Metric("answers_masked", "answers", "answers that are not trained because the token limit cut them", "all ranks"),
    Metric("answers_failed", "answers", "requests without an answer", "all ranks"),
    Metric("answers_rejected", "answers", "unusable answers of a server, each asked for again", "all ranks"),
    Metric("answers_rejected/*", "answers", "answers_rejected of one kind", "all ranks; * is the kind"),
    Metric("judge_calls", "answers", "answers that the judge was asked about", "all ranks"),
    Metric("judge_cache_hits", "answers", "answers whose score was known", "all ranks"),
    Metric("judge_failures", "answers", "answers without a score, of those to be scored", "all ranks"),
    Metric("judge_tokens", "tokens", "tokens of the judge's prompts and replies", "all ranks"),
    Metric("judge_compared", "answers", "answers with an exact verdict that the judge scored", "all ranks"),
    Metric("judge_agreement", "share", "compared answers on which score and exact verdict agree", "all ranks"),
    Metric("judge_kappa", "", "Cohen's kappa of score and exact verdict: agreement beyond chance", "all ranks"),
    Metric("groups_dropped", "groups", "groups with equal rewards, or fewer than two answers", "all ranks"),
    Metric("groups/*", "groups", "groups to learn from", "of one category, all ranks; * is the category"),
    Metric("refill_rounds", "rounds", "rounds of further cases in place of dropped groups", "of the batch"),
    Metric("staleness", "updates", "updates between the policy that answered and the one in training", "largest"),
    Metric("generation_time_s", "s", "time to generate and judge the batch", "rank 0; may overlap with training"),
    Metric("judging_time_s", "s", "part of generation_time_s in which answers were judged", "sum over ranks"),
    Metric("publish_time_s", "s", "time to hand the policy to the engine", "rank 0; part of data_time_s"),
    Metric("sleep_time_s", "s", "time until the server was awake, and then asleep", "rank 0; part of data_time_s"),
    Metric("entropy", "nats/token", "minus the mean log-probability of the generated tokens", _GENERATED),
    Metric("teacher_tail", "share", "teacher's probability of the tokens that it does not name", _DISTILLED),
    Metric("teacher_time_s", "s", "time in which a teacher's server scored the step's answers", "part of data_time_s"),
    Metric(
        "answers_from_rows", "answers", "conversations of data.sources that a distillation step trains", "all ranks"
    ),
    Metric("clip_share", "share", "tokens whose gradient the clip stopped", _GENERATED),
    Metric("ratio_mean", "ratio", "probability of a token in training over that of its generation", _GENERATED),
    Metric("ratio_max", "ratio", "largest such ratio", _EACH),
    Metric("ratio_capped_share", "share", "tokens whose ratio exceeds grpo.ratio_cap", _GENERATED),
    Metric("engine_gap", "nats/token", "mean distance of log-probabilities in training and generation", _GENERATED),
    Metric("kl", "nats/token", "estimated divergence from the reference; 0 without grpo.kl_beta", _GENERATED),
    Metric(
        "router_aux_loss",
        "",
        "load-balancing loss of a mixture's routers, without its coefficient",
        _EACH + ", not part of loss; top_k when balanced",
    ),
    Metric("lr", "", "learning rate of the step", "first parameter group"),
    Metric("grad_norm", "", "2-norm of the gradient of all trained parameters", "before clipping"),
    Metric("tokens_total", "tokens", "tokens of conversations", _EACH + ", without padding"),
    Metric("tokens_supervised", "tokens", "supervised tokens", _EACH),
    Metric("tokens_padding", "tokens", "padding tokens of the batch", _EACH),
    Metric("tokens_per_s", "tokens/s", "tokens_total / step_time_s", "all ranks together, without padding"),
    Metric("tokens_per_s_per_device", "tokens/s", "tokens_per_s / number of ranks", "one rank is one GPU"),
    Metric(
        "step_time_s",
        "s",
        "from requesting the data to the end of the update",
        "rank 0; without validation, evaluation",
    ),
    Metric("step_time_p50_s", "s", "median of step_time_s", "rank 0; last 1,000 steps without the first 3"),
    Metric("step_time_p99_s", "s", "99th percentile of step_time_s", "as step_time_p50_s; nearest rank"),
    Metric("data_time_s", "s", "part of step_time_s spent waiting for data", "rank 0"),
    Metric("data_time_max_s", "s", "time waiting for data, of the rank that waited longest", _INTERVAL),
    Metric("save_wait_s", "s", "part of step_time_s spent waiting for a save to copy the weights", "rank 0"),
    Metric("save_wait_max_s", "s", "save_wait_s of the rank that waited longest", _INTERVAL),
    Metric(
        "save_time_s", "s", "time to start saves", "rank 0; between the previous step and this one, part of neither"
    ),
    Metric("compiled_graphs", "graphs", "graphs that torch.compile has made since the start", "rank 0; compile: true"),
    Metric("compute_time_s", "s", "forward and backward time", "mean over ranks, previous step"),
    Metric("compute_skew", "ratio", "compute time of the slowest rank / (lower) median of ranks", "previous step"),
    Metric("slowest_rank", "rank", "rank with the longest compute time", "previous step"),
    Metric(
        "tflops_per_device",
        "TFLOP/s",
        "FLOPs that the model requires / step_time_s / number of ranks",
        "6N per token (4N over a frozen base) plus attention within conversations and windows; without recomputation",
    ),
    Metric(
        "hardware_tflops_per_device",
        "TFLOP/s",
        "FLOPs that the device computes / step_time_s / number of ranks",
        "with padding and recomputed activations; the output head at supervised tokens only",
    ),
    Metric("mfu", "share", "tflops_per_device / the GPU's dense bf16 rate", "from the datasheet, at any precision"),
    Metric("peak_memory_gib", "GiB", "peak memory since the start", "rank 0; allocated on CUDA, else resident"),
    Metric("peak_memory_max_gib", "GiB", "peak_memory_gib of the rank with the most", "every log_every_n_steps"),
    Metric("memory_active_gib", "GiB", "memory in use now, on the rank with the most", "active on CUDA, else resident"),
    Metric("memory_reserved_gib", "GiB", "memory reserved by torch now, on the rank with the most", "CUDA"),
    Metric(
        "alloc_retries",
        "",
        "allocations that succeeded only after freeing cached memory",
        "CUDA; since the start, all ranks",
    ),
    Metric("gpu_utilization", "share", "share of time with a kernel running, by NVML", "mean over ranks, " + _INTERVAL),
    Metric("gpu_utilization_min", "share", "gpu_utilization of the rank with the lowest", _INTERVAL),
    Metric("gpu_temperature_c", "degrees C", "temperature of the hottest GPU, by NVML", _INTERVAL),
    Metric("gpu_power_w", "W", "power of all GPUs together, by NVML", "mean, " + _INTERVAL),
    Metric(
        "gpu_hours",
        "GPU-hours",
        "GPU-hours since the run began",
        "across restarts; one rank is one GPU; every log_every_n_steps",
    ),
    Metric("cost", "", "gpu_hours * price_per_gpu_hour", "in the config's `currency`"),
    Metric("data_digest", "", "hash of the step's conversations", "the same on any number of ranks", "text"),
    Metric(
        "validation_loss", "nats/token", "loss on the validation split", "in steps with a validation; current weights"
    ),
    Metric("validation_reward_accuracy", "share", "reward_accuracy of held-out pairs", _VALIDATION_PAIRS),
    Metric("validation_reward_margin", "", "reward_margin of held-out pairs", _VALIDATION_PAIRS),
    Metric("validation_reward_chosen", "", "reward_chosen of held-out pairs", _VALIDATION_PAIRS),
    Metric("validation_reward_rejected", "", "reward_rejected of held-out pairs", _VALIDATION_PAIRS),
    Metric("validation_logps_chosen", "nats", "logps_chosen of held-out pairs", _VALIDATION_PAIRS),
    Metric("validation_logps_rejected", "nats", "logps_rejected of held-out pairs", _VALIDATION_PAIRS),
    Metric("validation_sft_loss", "nats/token", "sft_loss of held-out pairs", _VALIDATION_PAIRS),
    Metric("validation_time_s", "s", "duration of the validation", "rank 0; not part of step_time_s"),
    Metric("is_skipped", "", "update skipped because the loss or gradient norm was not finite", "", "flag"),
    Metric("is_spike", "", "loss far above the 50 preceding ones", "Hampel's rule", "flag"),
    Metric("spike_limit", "nats/token", "limit that the loss exceeded", "in steps with a loss spike"),
    Metric("eval_accuracy", "share", "held-out cases with all calls correct", "in steps with an evaluation"),
    Metric("eval_accuracy_low", "share", "lower bound of eval_accuracy", _WILSON),
    Metric("eval_accuracy_high", "share", "upper bound of eval_accuracy", _WILSON),
    Metric("eval_accuracy/*", "share", "eval_accuracy of one category", "if there are several; * is the category"),
    Metric("eval_tool_selection", "share", "cases whose called tools are the expected ones", _RATE),
    Metric("eval_tool_f1", "share", "F1 of tool names over calls", _RATE),
    Metric("eval_argument_f1", "share", "F1 of arguments over calls", _RATE),
    Metric("eval_schema_valid", "share", "calls that match their tool's schema", _RATE),
    Metric("eval_false_call", "share", "calls where none was expected", _RATE),
    Metric("eval_missed_call", "share", "no call where one was expected", _RATE),
    Metric("eval_num_cases", "cases", "evaluated cases", "all ranks together"),
    Metric("eval_time_s", "s", "duration of the evaluation", "rank 0"),
    Metric("eval_skipped", "", "reason why a due evaluation was skipped", "", "text"),
)

_BY_NAME = {metric.name: metric for metric in METRICS}


def find_metric(name: str) -> Metric | None:
    """Return the metric of a key in ``metrics.jsonl``; None if there is none of that name."""
    family, slash, _ = name.partition("/")
    return _BY_NAME.get(f"{family}/*" if slash else name)
