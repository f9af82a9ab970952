"""Adapters that put the cache into serving engines."""
