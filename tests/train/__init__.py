"""The trainer, part by part."""
