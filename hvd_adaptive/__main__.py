"""``python -m hvd_adaptive`` is the command ``hvd-adaptive``."""

import sys

from hvd_adaptive.cli import main

if __name__ == "__main__":
    sys.exit(main())
