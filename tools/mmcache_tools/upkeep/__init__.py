"""Changing a store from outside: rm, prune, compact, copy, export and import.

Owns: these commands, their text and their JSON. Does not own: writing to a store
(:mod:`tiered_mmcache.disk.maintenance`), or saying which entries are meant
(:mod:`mmcache_tools.inspection`).
"""
