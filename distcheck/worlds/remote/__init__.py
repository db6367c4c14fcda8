"""Runs ranks in processes that a launcher started, on this machine or on others.

bootstrap    connects these processes; secret and handshake authenticate them
coordinator  runs in the front end: a pool whose ranks are spread over these processes
agent        runs in every other process, and forks ranks for the front end
protocol     the messages between front end and agent
"""
