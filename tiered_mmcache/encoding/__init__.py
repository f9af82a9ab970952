"""Encoding once what no tier holds, and what that took."""
