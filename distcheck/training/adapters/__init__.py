"""Calling code whose author never heard of distcheck: a form per way in which people write it.

`forms` is the table of forms, `called.py` carries out its rows, and a form that does something of
its own has a file beside the table. `adapting.py` chooses the form, and watches that the code is
called. What code asks for by name is filled in by the `Scene`; `names.py` lists the names.
"""
