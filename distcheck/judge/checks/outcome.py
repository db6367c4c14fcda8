"""Every rank finished: none raised, exited, was killed or hung.

Judged by the front-end process (`distcheck.verification.verdicts`), which supervises the ranks;
this module only defines the name.
"""
