"""The configuration as a person meets it: config check, config schema and config init.

Owns: these commands. Does not own: the keys and their rules (:mod:`tiered_mmcache.config`).
"""
