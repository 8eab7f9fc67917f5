"""The viewer: what the model did, at a glance and down to the token; nothing here imports torch."""
