"""The command line; `python -m rollbook` is `rollbook`.

Invariant: help and `ls` import neither pyarrow, torch nor duckdb. An error of a book or a file is one line on standard
error and status 2, never a traceback.
"""

from rollbook.cli.parser import main as main

__all__ = ["main"]
