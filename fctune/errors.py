"""The three errors a user can meet; anything else that surfaces is a defect of this project."""


class ConfigError(ValueError):
    """A run that cannot start as configured: bad key or value, missing file, impossible combination."""


class DataError(ValueError):
    """A dataset, row, template or tokenizer that cannot be trained on as it is."""


class CheckpointError(ValueError):
    """Weights or saved state that cannot be read, written, or resumed from."""
