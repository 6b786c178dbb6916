"""The config schema, its checks, and loading."""
