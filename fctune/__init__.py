"""fctune: fine-tune chat models to call functions, with torchtune, and measure whether they do."""

import logging

__version__ = "0.1.0"

# On import, torchao warns in every process that it skips C++ kernels, which fctune does not use.
logging.getLogger("torchao").setLevel(logging.ERROR)
