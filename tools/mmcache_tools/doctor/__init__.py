"""`mmcache doctor`: what stands between this machine and a cache that works well.

Owns: the checks, their findings and remedies. Does not own: the rules of the configuration
(:mod:`tiered_mmcache.config`), or changing anything.
"""
