"""The peers' packages are on the path, as they are in a benchmark."""

import sys

from benchmarks.setup import PEERS

sys.path.append(str(PEERS.absolute()))
