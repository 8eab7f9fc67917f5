"""The record (`Experience`, `EID`), its columns (`Experiences`, `Ragged`), its bytes (`wire`), checks, errors."""
