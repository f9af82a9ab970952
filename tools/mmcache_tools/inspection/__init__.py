"""Looking into a store from outside: ls, show, stats and verify, without torch.

Owns: these commands, their tables and their JSON. Does not own: reading a store
(:mod:`tiered_mmcache.disk.reader`) or judging it (:mod:`tiered_mmcache.disk.audit`).
"""
