"""The sections of a run's config; ``fctune.config.schema`` puts them together."""
