"""Several judged answers to each case: rewards, pass rates, training rows, preference pairs and rollouts."""
