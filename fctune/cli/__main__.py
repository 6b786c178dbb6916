"""``python -m fctune.cli``, for where the command is not on the path."""

import sys

from fctune.cli import main

sys.exit(main())
