"""The book: a durable store of experience with leases, samplers, staleness, revisions, a ledger and SQL.

`rollbook.open` opens one; the parts here are what its settings are made of.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollbook.core.lazy import lazily

if TYPE_CHECKING:
    from rollbook.book.admission import AppendResult as AppendResult
    from rollbook.book.book import Book as Book
    from rollbook.book.checkpoints import Checkpoint as Checkpoint
    from rollbook.book.checkpoints import RewindResult as RewindResult
    from rollbook.book.compaction import CompactionResult as CompactionResult
    from rollbook.book.consumers import Settings as Settings
    from rollbook.book.errors import BackPressureError as BackPressureError
    from rollbook.book.errors import BookError as BookError
    from rollbook.book.errors import ConflictError as ConflictError
    from rollbook.book.errors import ConnectionLostError as ConnectionLostError
    from rollbook.book.errors import CorruptBookError as CorruptBookError
    from rollbook.book.errors import LeaseLostError as LeaseLostError
    from rollbook.book.errors import LockTimeoutError as LockTimeoutError
    from rollbook.book.errors import NewerLayoutError as NewerLayoutError
    from rollbook.book.errors import NotABookError as NotABookError
    from rollbook.book.errors import OutcomeUnknownError as OutcomeUnknownError
    from rollbook.book.errors import QuotaExceededError as QuotaExceededError
    from rollbook.book.errors import ReadOnlyError as ReadOnlyError
    from rollbook.book.errors import UnknownConsumerError as UnknownConsumerError
    from rollbook.book.errors import WriterStoppedError as WriterStoppedError
    from rollbook.book.findings import Finding as Finding
    from rollbook.book.findings import Report as Report
    from rollbook.book.leasing import Lease as Lease
    from rollbook.book.limits import MaxAge as MaxAge
    from rollbook.book.limits import MaxSize as MaxSize
    from rollbook.book.limits import MaxUses as MaxUses
    from rollbook.book.limits import MinSize as MinSize
    from rollbook.book.limits import SamplesToInserts as SamplesToInserts
    from rollbook.book.mixing import Mix as Mix
    from rollbook.book.mixing import Part as Part
    from rollbook.book.opening import open as open
    from rollbook.book.query import QueryError as QueryError
    from rollbook.book.query import QueryTimeoutError as QueryTimeoutError
    from rollbook.book.repairing import repair as repair
    from rollbook.book.reports import Counts as Counts
    from rollbook.book.samplers import Balanced as Balanced
    from rollbook.book.samplers import EasyToHard as EasyToHard
    from rollbook.book.samplers import First as First
    from rollbook.book.samplers import Last as Last
    from rollbook.book.samplers import NewestPolicy as NewestPolicy
    from rollbook.book.samplers import Priority as Priority
    from rollbook.book.samplers import Proportional as Proportional
    from rollbook.book.samplers import Uniform as Uniform

_HOMES = {
    "AppendResult": "rollbook.book.admission",
    "BackPressureError": "rollbook.book.errors",
    "Balanced": "rollbook.book.samplers",
    "Book": "rollbook.book.book",
    "BookError": "rollbook.book.errors",
    "Checkpoint": "rollbook.book.checkpoints",
    "CompactionResult": "rollbook.book.compaction",
    "ConflictError": "rollbook.book.errors",
    "ConnectionLostError": "rollbook.book.errors",
    "Counts": "rollbook.book.reports",
    "CorruptBookError": "rollbook.book.errors",
    "EasyToHard": "rollbook.book.samplers",
    "Finding": "rollbook.book.findings",
    "First": "rollbook.book.samplers",
    "Last": "rollbook.book.samplers",
    "Lease": "rollbook.book.leasing",
    "LeaseLostError": "rollbook.book.errors",
    "LockTimeoutError": "rollbook.book.errors",
    "MaxAge": "rollbook.book.limits",
    "MaxSize": "rollbook.book.limits",
    "MaxUses": "rollbook.book.limits",
    "MinSize": "rollbook.book.limits",
    "Mix": "rollbook.book.mixing",
    "NewerLayoutError": "rollbook.book.errors",
    "NewestPolicy": "rollbook.book.samplers",
    "NotABookError": "rollbook.book.errors",
    "OutcomeUnknownError": "rollbook.book.errors",
    "Part": "rollbook.book.mixing",
    "Priority": "rollbook.book.samplers",
    "Proportional": "rollbook.book.samplers",
    "QueryError": "rollbook.book.query",
    "QueryTimeoutError": "rollbook.book.query",
    "QuotaExceededError": "rollbook.book.errors",
    "ReadOnlyError": "rollbook.book.errors",
    "Report": "rollbook.book.findings",
    "RewindResult": "rollbook.book.checkpoints",
    "SamplesToInserts": "rollbook.book.limits",
    "Settings": "rollbook.book.consumers",
    "Uniform": "rollbook.book.samplers",
    "UnknownConsumerError": "rollbook.book.errors",
    "WriterStoppedError": "rollbook.book.errors",
    "open": "rollbook.book.opening",
    "repair": "rollbook.book.repairing",
}

# Not `open`: a star would hide the built-in one.
__all__ = sorted(name for name in _HOMES if name != "open")

__getattr__, __dir__ = lazily(__name__, _HOMES)
