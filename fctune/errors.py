"""Errors caused by a user's input; any other exception is a defect of this project."""


class ConfigError(ValueError):
    """Invalid config or usage: unknown key, wrong value, missing file, impossible combination."""


class DataError(ValueError):
    """Invalid dataset, row, chat template or tokenizer."""


class CheckpointError(ValueError):
    """Weights or a checkpoint that cannot be read, written or resumed from."""
