"""The disk tier: the store, the spill worker that owns it, and the server's handle on it."""
