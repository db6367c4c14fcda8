"""Runs ranks in processes that a launcher started, on this or other machines.

bootstrap   connects them; secret and handshake authenticate them
coordinator  runs in the front end: a pool whose ranks are spread over these processes
agent       runs in every other process, and runs its ranks for the front end
protocol    the messages between front end and agent
"""
