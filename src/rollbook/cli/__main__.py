"""`python -m rollbook.cli`: the same as `rollbook`."""

import sys

from rollbook.cli.parser import main

sys.exit(main())
