"""Inspection of a run: its index, the doctor, the web viewer and HTML export. Nothing here imports torch."""
