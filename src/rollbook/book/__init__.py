"""The book: a durable store of experience with leases, samplers, staleness, revisions, a ledger and SQL.

`rollbook.open` opens one. This package exports the settings, results and exceptions of its methods.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollbook.core import lazily

if TYPE_CHECKING:
    from rollbook.book.append import AppendResult as AppendResult
    from rollbook.book.append import Writer as Writer
    from rollbook.book.append import read_vocabulary as read_vocabulary
    from rollbook.book.book import Book as Book
    from rollbook.book.book import open as open
    from rollbook.book.check import Finding as Finding
    from rollbook.book.check import Report as Report
    from rollbook.book.checkpoint import Checkpoint as Checkpoint
    from rollbook.book.checkpoint import RewindResult as RewindResult
    from rollbook.book.checkpoint import forget_checkpoint as forget_checkpoint
    from rollbook.book.checkpoint import trained_steps as trained_steps
    from rollbook.book.compaction import CompactionResult as CompactionResult
    from rollbook.book.consumer import ConsumerConfig as ConsumerConfig
    from rollbook.book.consumer import MaxAge as MaxAge
    from rollbook.book.consumer import MaxSize as MaxSize
    from rollbook.book.consumer import MaxUses as MaxUses
    from rollbook.book.consumer import MinSize as MinSize
    from rollbook.book.consumer import SamplesToInserts as SamplesToInserts
    from rollbook.book.consumer import remove_consumer as remove_consumer
    from rollbook.book.errors import BackPressureError as BackPressureError
    from rollbook.book.errors import BookError as BookError
    from rollbook.book.errors import ConflictError as ConflictError
    from rollbook.book.errors import ConnectionLostError as ConnectionLostError
    from rollbook.book.errors import CorruptBookError as CorruptBookError
    from rollbook.book.errors import LeaseLostError as LeaseLostError
    from rollbook.book.errors import LockTimeoutError as LockTimeoutError
    from rollbook.book.errors import MissingBookError as MissingBookError
    from rollbook.book.errors import NewerLayoutError as NewerLayoutError
    from rollbook.book.errors import NotABookError as NotABookError
    from rollbook.book.errors import OutcomeUnknownError as OutcomeUnknownError
    from rollbook.book.errors import QuotaExceededError as QuotaExceededError
    from rollbook.book.errors import ReadOnlyError as ReadOnlyError
    from rollbook.book.errors import StoreFullError as StoreFullError
    from rollbook.book.errors import UnknownConsumerError as UnknownConsumerError
    from rollbook.book.errors import WriterStoppedError as WriterStoppedError
    from rollbook.book.lease import Lease as Lease
    from rollbook.book.lease import Mix as Mix
    from rollbook.book.lease import Part as Part
    from rollbook.book.query import QueryError as QueryError
    from rollbook.book.query import QueryTimeoutError as QueryTimeoutError
    from rollbook.book.queue import read_policy_lineage as read_policy_lineage
    from rollbook.book.read import Selection as Selection
    from rollbook.book.recovery import repair as repair
    from rollbook.book.reports import Counts as Counts
    from rollbook.book.reports import keep_rates as keep_rates
    from rollbook.book.revision import redact_records as redact_records
    from rollbook.book.sampler import Balanced as Balanced
    from rollbook.book.sampler import EasyToHard as EasyToHard
    from rollbook.book.sampler import First as First
    from rollbook.book.sampler import Last as Last
    from rollbook.book.sampler import NewestPolicy as NewestPolicy
    from rollbook.book.sampler import OldestPolicy as OldestPolicy
    from rollbook.book.sampler import Priority as Priority
    from rollbook.book.sampler import Proportional as Proportional
    from rollbook.book.sampler import Uniform as Uniform
    from rollbook.book.transfer import export_records as export_records
    from rollbook.book.transfer import fork as fork
    from rollbook.book.transfer import import_records as import_records
    from rollbook.book.transfer import snapshot as snapshot

_NAMES = {
    "append": "AppendResult Writer read_vocabulary",
    "book": "Book open",
    "check": "Finding Report",
    "checkpoint": "Checkpoint RewindResult forget_checkpoint trained_steps",
    "compaction": "CompactionResult",
    "consumer": "ConsumerConfig MaxAge MaxSize MaxUses MinSize SamplesToInserts remove_consumer",
    "errors": "BackPressureError BookError ConflictError ConnectionLostError CorruptBookError LeaseLostError "
    "LockTimeoutError MissingBookError NewerLayoutError NotABookError OutcomeUnknownError QuotaExceededError "
    "ReadOnlyError StoreFullError UnknownConsumerError WriterStoppedError",
    "lease": "Lease Mix Part",
    "query": "QueryError QueryTimeoutError",
    "queue": "read_policy_lineage",
    "read": "Selection",
    "recovery": "repair",
    "reports": "Counts keep_rates",
    "revision": "redact_records",
    "sampler": "Balanced EasyToHard First Last NewestPolicy OldestPolicy Priority Proportional Uniform",
    "transfer": "export_records fork import_records snapshot",
}
_HOMES = {name: f"rollbook.book.{module}" for module, names in _NAMES.items() for name in names.split()}

# Not `open`: a star would hide the built-in one.
__all__ = sorted(name for name in _HOMES if name != "open")

__getattr__, __dir__ = lazily(__name__, _HOMES)
