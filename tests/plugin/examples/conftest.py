"""Patience: on a crowded machine, too, ranks tell themselves what has become of them."""

from distcheck.worlds import world

world._GRACE_S = 3.0
world._ASK_S = 20.0
