"""`python -m rollbook`: the same as the command `rollbook`."""

import sys

from rollbook.cli import main

sys.exit(main())
