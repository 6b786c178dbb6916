"""Measurement of a run: metrics, alerts, device readings, profiles, and the sinks they are written to."""
