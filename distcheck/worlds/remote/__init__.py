"""Ranks in processes that a launcher started, on this or other machines.

bootstrap   how they find each other; secret, handshake: how they authenticate
coordinator  the coordinator in the front end: a pool whose ranks are spread over these processes
agent       the agent in every other process: runs its ranks for the front end
protocol    the protocol between the two
"""
