"""Segment stores: where the bytes of records and media are, in files, in PostgreSQL or through fsspec."""
