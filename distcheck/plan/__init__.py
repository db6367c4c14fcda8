"""Planning: converts a request to cases, each with the amounts that its checks must compare. Does
not import torch.

cases          from a request to cases, and from a case to its checks
settings       options declared once, for the command line, the configuration file, Python, and a
               request
configuration  `[tool.distcheck]` and its matrix; `matrix` converts it to cases
coverage       the amount that each check must compare for a verdict
thorough       additional cases of `--thorough`
costs          estimated duration of a case
provenance     code and versions that the bits of a case depend on
"""
