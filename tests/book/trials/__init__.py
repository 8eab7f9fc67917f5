"""Trials of the book under crashes and concurrency: `python -m tests.book.trials --help`."""
