"""Any causal language model of transformers: its config, modules, attention and weights."""
