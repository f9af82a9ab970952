"""The cache beside what a user would pick in its place: the same work, side by side, in one run.

Owns: the systems, their environments, the measurements, and the page made of them.
Does not own: this project's own bench (:mod:`mmcache_tools.bench`), the traces
(:mod:`mmcache_tools.workload`).

Each system runs in a process and an environment of its own, so that nothing of it is imported here.
"""
