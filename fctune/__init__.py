"""fctune: fine-tune chat models to call functions, with torchtune, and measure whether they do."""

import logging

__version__ = "0.1.0"

# torchao says on import, once a process, that it skips C++ kernels that nothing here uses.
logging.getLogger("torchao").setLevel(logging.ERROR)
