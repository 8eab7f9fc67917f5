"""The book: a durable store of experience with leases, samplers, staleness, revisions, a ledger and SQL.

`rollbook.open` opens one; the parts here are what its settings are made of.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollbook.core.lazy import lazily

if TYPE_CHECKING:
    from rollbook.book.admission import Appended as Appended
    from rollbook.book.book import Book as Book
    from rollbook.book.checkpoints import Checkpoint as Checkpoint
    from rollbook.book.checkpoints import Rewound as Rewound
    from rollbook.book.compaction import Compacted as Compacted
    from rollbook.book.consumers import Settings as Settings
    from rollbook.book.errors import BackPressure as BackPressure
    from rollbook.book.errors import BookError as BookError
    from rollbook.book.errors import Conflict as Conflict
    from rollbook.book.errors import ConnectionLost as ConnectionLost
    from rollbook.book.errors import Damaged as Damaged
    from rollbook.book.errors import LeaseLost as LeaseLost
    from rollbook.book.errors import LockTimeout as LockTimeout
    from rollbook.book.errors import NewerLayout as NewerLayout
    from rollbook.book.errors import NotABook as NotABook
    from rollbook.book.errors import OutcomeUnknown as OutcomeUnknown
    from rollbook.book.errors import QuotaExceeded as QuotaExceeded
    from rollbook.book.errors import ReadOnly as ReadOnly
    from rollbook.book.errors import UnknownConsumer as UnknownConsumer
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
    from rollbook.book.query import QueryTimeout as QueryTimeout
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
    from rollbook.book.shelves import WriterStopped as WriterStopped

_HOMES = {
    "Appended": "rollbook.book.admission",
    "BackPressure": "rollbook.book.errors",
    "Balanced": "rollbook.book.samplers",
    "Book": "rollbook.book.book",
    "BookError": "rollbook.book.errors",
    "Checkpoint": "rollbook.book.checkpoints",
    "Compacted": "rollbook.book.compaction",
    "Conflict": "rollbook.book.errors",
    "ConnectionLost": "rollbook.book.errors",
    "Counts": "rollbook.book.reports",
    "Damaged": "rollbook.book.errors",
    "EasyToHard": "rollbook.book.samplers",
    "Finding": "rollbook.book.findings",
    "First": "rollbook.book.samplers",
    "Last": "rollbook.book.samplers",
    "Lease": "rollbook.book.leasing",
    "LeaseLost": "rollbook.book.errors",
    "LockTimeout": "rollbook.book.errors",
    "MaxAge": "rollbook.book.limits",
    "MaxSize": "rollbook.book.limits",
    "MaxUses": "rollbook.book.limits",
    "MinSize": "rollbook.book.limits",
    "Mix": "rollbook.book.mixing",
    "NewerLayout": "rollbook.book.errors",
    "NewestPolicy": "rollbook.book.samplers",
    "NotABook": "rollbook.book.errors",
    "OutcomeUnknown": "rollbook.book.errors",
    "Part": "rollbook.book.mixing",
    "Priority": "rollbook.book.samplers",
    "Proportional": "rollbook.book.samplers",
    "QueryError": "rollbook.book.query",
    "QueryTimeout": "rollbook.book.query",
    "QuotaExceeded": "rollbook.book.errors",
    "ReadOnly": "rollbook.book.errors",
    "Report": "rollbook.book.findings",
    "Rewound": "rollbook.book.checkpoints",
    "SamplesToInserts": "rollbook.book.limits",
    "Settings": "rollbook.book.consumers",
    "Uniform": "rollbook.book.samplers",
    "UnknownConsumer": "rollbook.book.errors",
    "WriterStopped": "rollbook.book.shelves",
    "open": "rollbook.book.opening",
    "repair": "rollbook.book.repairing",
}

# Not `open`: a star would hide the built-in one.
__all__ = sorted(name for name in _HOMES if name != "open")

__getattr__, __dir__ = lazily(__name__, _HOMES)
