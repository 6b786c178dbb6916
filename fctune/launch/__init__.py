"""What stands between a cluster and a run: is it fit, are model and data there, what is the run told."""
