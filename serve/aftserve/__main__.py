"""``python -m aftserve`` is the ``aftserve`` command."""

import sys

from aftserve.cli import main

sys.exit(main())
