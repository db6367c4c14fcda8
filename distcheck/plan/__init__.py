"""From a request to cases: what will run, and how much each check must compare. No torch.

cases          from a request to cases, and from a case to its checks
request        what was asked for
settings       options that are declared once, for the command line, the file and Python
configuration  `[tool.distcheck]` and its matrix; `matrix` makes cases of it
coverage       how much a check must compare to count
thorough       what `--thorough` adds
costs          how long a case is likely to take
provenance     the code and versions that the bits of a case depend on
"""
