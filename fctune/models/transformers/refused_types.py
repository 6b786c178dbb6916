"""Architectures of transformers' causal language models that are refused by name, with the reason.

The others are measured: docs/reference/supported-models.md. A test compares both with the list of transformers.
"""

from __future__ import annotations

_REFUSED: dict[str, tuple[str, ...]] = {
    "is an encoder-decoder, or the decoder of one, but only decoders of their own are trained here": (
        *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "musicgen"),
        *("musicgen_melody", "mvp", "pegasus", "plbart", "prophetnet", "trocr", "whisper"),
    ),
    "is an encoder with a head for language modelling, whose models do not chat": (
        *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert"),
        *("reformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm", "xlm-roberta"),
        *("xlm-roberta-xl", "xlnet", "xmod"),
    ),
    "computes attention or positions in its own way, so its conversations cannot be kept apart": (
        *("bloom", "codegen", "cpmant", "ctrl", "falcon", "gpt_neo", "gpt_neox_japanese", "gptj", "mpt", "opt", "xglm"),
        "doge",
    ),
    "draws random numbers while it trains, so its runs would depend on the number of ranks": ("biogpt",),
    "cannot be built by transformers, whose class reads a key that its config lacks": ("dbrx",),
    "has projections that are no linear layers (Conv1D), so they take no adapters": ("gpt2", "gpt-sw3", "openai-gpt"),
    "has layers without attention only, whose states carry from one conversation of a row to the next": (
        *("falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"),
    ),
    "shares blocks among its layers, which are trained and saved as one": ("zamba", "zamba2"),
    "iterates over its blocks, which are not in one list": ("blt", "hrm_text"),
    "selects the tokens to attend to by an indexer, which needs a mask": (
        *("axk2", "dots3_note", "dots3_note_text", "hy_v4", "qwen4_exp", "qwen4_exp_text"),
    ),
    "adds a bias of relative positions to attention, which fctune's attention does not have": (
        *("inkling_text", "inkling2_text"),
    ),
    "has two attentions and two feed-forward parts in each layer, which fctune does not divide": ("longcat_flash",),
    "gives other logits here than in transformers alone, by its lightning attention": ("minimax",),
    "trains to other losses here than in transformers alone if all weights train": ("minicpm3",),
    "rounds its weights to three values in each pass (BitNet), which fctune does not do": ("bitnet",),
    "computes its experts, which are also in attention, with code of its own: they take no adapters, and their graphs "
    "are compiled anew for each batch": ("jetmoe",),
    "computes its recurrence token by token, in time that grows with the square of a conversation's length": (
        "recurrent_gemma",
    ),
    "writes tokens ahead for another model and has no use of its own": (
        *("gemma4_assistant", "gemma4_unified_assistant"),
    ),
    "reads or writes images or sound through parts that fctune neither trains nor checks": (
        *("cohere_compass_text", "emu3", "fuyu", "git", "got_ocr2", "mllama", "moshi", "moss_transcribe_diarize"),
        "phi4_multimodal",
    ),
    "has parts that get no gradient (AltUp), so its optimizer's state cannot be saved": ("gemma3n", "gemma3n_text"),
    "has a vision tower with which it was not measured; its text model is trained": ("llama4",),
}
_REASONS = {name: reason for reason, names in _REFUSED.items() for name in names}


def list_refusals() -> dict[str, tuple[str, ...]]:
    """Return the model types that are refused for each reason."""
    return dict(_REFUSED)


def find_refusal(model_type: str) -> str | None:
    """Return why an architecture is refused, as the end of a sentence about it; None if it is not refused by name."""
    return _REASONS.get(model_type)
