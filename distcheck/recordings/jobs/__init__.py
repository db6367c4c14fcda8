"""Recordings of training jobs: the ranks' files, and their reader.

records     a record of each optimizer step in JSON, with its tensors next to it and the
            operators that torch ran
reading     reads all files; any of them may be damaged
watched     inputs and outputs of the modules of a step
sketches    64 projections in place of a tensor that is too large to keep
"""
