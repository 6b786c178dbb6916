"""Pages and texts that several apps write: one page builder, charts of runs, and number formats."""
