"""Padded and packed batches of records, and the micro-batch planner."""
