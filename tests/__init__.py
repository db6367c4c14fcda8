"""distcheck's own tests.

unit/       pure functions, no processes
world/      real ranks, real gloo, the command line
mutants/    known-bad strategies and workloads x the check that must catch each
snapshots/  report screens, compared to the letter
"""
