"""Attacks: what a downloaded file, another user or a strategy's own text must not achieve."""
