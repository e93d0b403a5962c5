"""``python -m aftexport`` is the ``aftexport`` command."""

import sys

from aftexport.cli import main

sys.exit(main())
