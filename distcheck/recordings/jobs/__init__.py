"""What the ranks of a training job write, and how it is read again.

records     a record of each optimizer step, in JSON, with its tensors beside it and the operators
            that torch ran
reading     all of them; everything there may be damaged
watched     what the modules of a step were given and returned
sketches    64 sums in place of a tensor that is too large to keep
"""
