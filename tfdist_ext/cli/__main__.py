"""python -m tfdist_ext.cli: the same as `tfdist`."""

import sys

from tfdist_ext.cli import main

if __name__ == "__main__":
    sys.exit(main())
