"""Files that come with the package: the tiny base model of the demo, and what builds it."""
