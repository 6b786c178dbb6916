"""Launch of a run on a cluster: preflight, hub downloads and uploads, environment overrides, serving options."""
