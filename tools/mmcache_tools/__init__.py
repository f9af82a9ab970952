"""The `mmcache` command: look into a store, measure, and see the cache do its job.

Owns: everything that a person runs. Does not own: the cache itself (:mod:`tiered_mmcache`).
"""
