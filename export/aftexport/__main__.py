"""The ``aftexport`` command by ``python -m aftexport``."""

import sys

from aftexport.cli import main

sys.exit(main())
