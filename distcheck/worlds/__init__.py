"""How ranks come to exist, are watched, and end.

helper.py       the process that imports torch once and forks everything else
child.py        what a forked process does before and after its job
messages.py     what the three kinds of process say to each other
pool.py         the front's side of the helper: start, kill, pump events
world.py        one world of ranks: linger, deadline, blame
stalls.py       telling a hung rank from a slow machine
rendezvous.py   how the ranks of a world find each other
"""
