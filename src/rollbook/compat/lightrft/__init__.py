"""LightRFT's experience makers, batches, replay buffer and trajectory saver."""
