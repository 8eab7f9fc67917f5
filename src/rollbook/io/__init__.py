"""Records in other formats: Arrow tables, Parquet, Hugging Face datasets, JSONL, and the files of other frameworks.

`read` and `write` take any of `FORMATS`, a batch at a time. `read_parquet`, `write_parquet`, `from_hf`, `to_hf`,
`from_table` and `to_table` convert all records at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollbook.core import lazily

if TYPE_CHECKING:
    from rollbook.io.arrow import from_table as from_table
    from rollbook.io.arrow import to_table as to_table
    from rollbook.io.formats import FORMATS as FORMATS
    from rollbook.io.formats import Reading as Reading
    from rollbook.io.formats import Report as Report
    from rollbook.io.formats import Skipped as Skipped
    from rollbook.io.formats import guess as guess
    from rollbook.io.formats import list_tables as list_tables
    from rollbook.io.formats import read as read
    from rollbook.io.formats import write as write
    from rollbook.io.hf import from_hf as from_hf
    from rollbook.io.hf import to_hf as to_hf
    from rollbook.io.parquet import read_parquet as read_parquet
    from rollbook.io.parquet import write_parquet as write_parquet
    from rollbook.io.torch_dataset import ExperienceDataset as ExperienceDataset

_HOMES = {
    "FORMATS": "rollbook.io.formats",
    "ExperienceDataset": "rollbook.io.torch_dataset",
    "Reading": "rollbook.io.formats",
    "Report": "rollbook.io.formats",
    "Skipped": "rollbook.io.formats",
    "from_hf": "rollbook.io.hf",
    "from_table": "rollbook.io.arrow",
    "guess": "rollbook.io.formats",
    "list_tables": "rollbook.io.formats",
    "read": "rollbook.io.formats",
    "read_parquet": "rollbook.io.parquet",
    "to_hf": "rollbook.io.hf",
    "to_table": "rollbook.io.arrow",
    "write": "rollbook.io.formats",
    "write_parquet": "rollbook.io.parquet",
}

__all__ = [
    "FORMATS",
    "ExperienceDataset",
    "Reading",
    "Report",
    "Skipped",
    "from_hf",
    "from_table",
    "guess",
    "list_tables",
    "read",
    "read_parquet",
    "to_hf",
    "to_table",
    "write",
    "write_parquet",
]

__getattr__, __dir__ = lazily(__name__, _HOMES)
