"""The tiny base model of the demo, and how it is built."""
