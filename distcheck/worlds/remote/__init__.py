"""Ranks in processes that a launcher started, on this or other machines.

meeting     bootstrap: how they find each other; secret, greetings: how they authenticate
fleet       the coordinator in the front end: a pool whose ranks are spread over these processes
host        the agent in every other process: runs its ranks for the front end
wire        the protocol between the two
"""
