"""Watching a running cache from outside, by the metrics that it publishes.

Owns: reading the files of metrics, and the live view. Does not own: the metrics
(:mod:`tiered_mmcache.metrics`). Nothing here asks the server anything.
"""
