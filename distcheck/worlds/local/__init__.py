"""Forks ranks on this machine from a helper process, supervises and ends them.

helper          imports torch once, then forks; helper_process: the two kinds of helper process
forking         front-end handle of the helper; children: one forked process
child           the lifecycle of a forked process
forks           makes forks cheap once there are many
late_compiler   torch's compiler, imported on first use
"""
