"""Ranks on this machine: forked from a helper process, watched, and ended."""
