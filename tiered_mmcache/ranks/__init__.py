"""Ranks of a tensor-parallel group that agree on every look-up."""
