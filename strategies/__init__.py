"""The gradient-synchronization strategies under test, one short file each.

They are written to be read. Nothing in distcheck imports them: it finds them by entry point
(`distcheck.strategies` in pyproject.toml), as it finds a user's.
"""
