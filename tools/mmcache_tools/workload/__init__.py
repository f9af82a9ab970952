"""Seeded request traces for multimodal caches: which image is asked for when, and what it costs.

Owns: making such traces. Does not own: playing them against a cache.
"""
