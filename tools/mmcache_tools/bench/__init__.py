"""Measurements of the cache beside what it is compared with, always in one run, as ratios."""
