"""`mmcache demo`: a real encoder, real images, and the cache between them.

Owns: the main job from end to end, with its own checks. Does not own: the cache, or how well it
performs: nothing here is a benchmark.
"""
