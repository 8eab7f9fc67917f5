"""Tests, and the trials that `make soak` runs.

A shell starts background jobs with SIGINT ignored, and children inherit that: Ctrl-C would end none of the programs
that are tested.
"""

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
