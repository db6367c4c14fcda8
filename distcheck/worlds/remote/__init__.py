"""Ranks in processes that a launcher started, here or on other machines."""
