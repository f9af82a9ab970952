"""One module for each system that is measured.

Owns: how each is called. Does not own: what is measured of it.
"""
