"""Function calls as text and as values: render, parse, match, score. Knows nothing of training."""
