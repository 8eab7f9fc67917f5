"""The parts of `rollbook.compat.lightrft.saver`: which samples are kept, how one becomes a record, and how files are
written.

Invariant: nothing here changes what it is given.
"""
