"""Every reader, given files that are damaged; see `readers.py` and `mutations.py`."""
