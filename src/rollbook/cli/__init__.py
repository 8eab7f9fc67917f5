"""The command line; `python -m rollbook` is `rollbook`.

Invariant: what is not asked for is not loaded: help, and `ls`, which the ledger answers, import neither pyarrow, torch
nor duckdb. What a book or a file refuses is one line on the standard error and status 2, never a traceback.
"""

from rollbook.cli.parser import main as main

__all__ = ["main"]
