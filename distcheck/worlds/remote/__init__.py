"""Ranks in processes that a launcher started, here or on other machines.

bootstrap   how they find each other; secret, greetings: how they prove who they are
coordinator  the front: a pool whose ranks are spread over them; links: one of them, as it sees it
agent       the other side: lends its ranks to the front
protocol    what the two say to each other
"""
