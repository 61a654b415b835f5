"""`python -m sim_npu`."""

import sys

from sim_npu.cli import main

if __name__ == "__main__":
    sys.exit(main())
