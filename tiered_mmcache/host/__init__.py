"""Host memory: the arena shared with the spill worker, what resides in it, and copies to it."""
