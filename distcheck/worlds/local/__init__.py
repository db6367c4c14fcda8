"""Ranks on this machine: forked from a helper process, supervised, and ended.

helper          imports torch once, then forks; helper_process: the two kinds of helper process
forking         the front end's side of the helper; children: one forked process
child           the lifecycle of a forked process
forks           makes forks cheap once there are many
late_compiler   torch's compiler, imported on first use
"""
