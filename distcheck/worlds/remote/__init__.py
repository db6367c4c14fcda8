"""Ranks in processes that a launcher started, on this or other machines.

bootstrap   connects them; secret and handshake authenticate them
coordinator  the coordinator in the front end: a pool whose ranks are spread over these processes
agent       the agent in every other process: runs its ranks for the front end
protocol    the protocol between the two
"""
