"""Every rank finished: none raised, exited, was killed or hung.

The front-end process (`distcheck.verification.verdicts`) supervises the ranks and judges this
check; the module only defines its name.
"""
