"""Access traces: what was asked of a cache, when, and what came of it.

Owns: the file's format and recording. Does not own: what is made of a trace (the tools).
"""
