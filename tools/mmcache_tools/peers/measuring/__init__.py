"""What a child process measures of the one system that it has.

Owns: the measurements. Does not own: which systems take turns, and what is made of the figures.
"""
