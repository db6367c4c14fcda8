"""Ranks in processes that a launcher started, here or on other machines.

meeting     how they find each other; secret, greetings: how they prove who they are
fleet       the front: a pool whose ranks are spread over them; links: one of them, as it sees it
host        the other side: lends its ranks to the front
wire        what the two say to each other
"""
