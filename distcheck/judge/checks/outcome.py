"""Every rank finished: none raised, exited, was killed or hung.

Judged by the front (`distcheck.verification.verdicts`), which is what sees ranks end; here for
its name.
"""
