"""Adapters for code that does not use distcheck's interface. Each way to write such code has a
form.

`forms` is the table of forms and `called.py` executes its rows; a form with special behavior has a
file next to the table. `adapting.py` selects the form, and checks that the code is called. The
`Scene` supplies the parameters that code requests by name; `names.py` lists the names.
"""
