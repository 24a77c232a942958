#!/usr/bin/env python
"""Start a cluster on this machine: the same as `tfdist run`, without the installed command.

python scripts/launch_local.py --workers 2 -- python train.py --epochs 3
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tfdist_ext.cli import main

if __name__ == "__main__":
    sys.exit(main(["run", *sys.argv[1:]]))
