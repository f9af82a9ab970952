"""How large the tiers should be, told from a trace of requests.

Owns: reading traces of any origin, what tiers of given sizes would have made of them, and a
recommendation. Does not own: recording (:mod:`tiered_mmcache.tracing`), or making workloads.
"""
