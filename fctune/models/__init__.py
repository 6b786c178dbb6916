"""Models as the training step needs them. One of the few rooms that import torchtune."""
