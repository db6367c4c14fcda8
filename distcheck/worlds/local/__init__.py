"""Ranks on this machine: forked from a helper process, watched, and ended.

helper          imports torch once, then forks; helper_process: two ways for it to exist
forking         the front's side of it; children: one forked process, as the front sees it
child           what a forked process does before, during and after its job
forks           forks that cost less once there are many
late_compiler   torch's compiler, imported where something of it is used
"""
