"""fctune: fine-tune chat models to call functions, with torchtune, and measure whether they do."""

__version__ = "0.1.0"
