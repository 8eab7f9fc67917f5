"""The published vectors: what they are made of, what makes them, and what is checked against them."""
