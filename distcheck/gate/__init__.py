"""What a gate needs around a verification: a matrix from a file, its plan and cost, its parts put
together again. No torch, and no rank is started here.
"""
