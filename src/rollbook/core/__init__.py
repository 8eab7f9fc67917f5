"""The record (`Experience`, `EID`), its columns (`Experiences`, `Ragged`), its bytes (`wire`), checks, errors."""

__version__ = "0.1.0"
