"""What ranks did, written down: the one thing that checks, causes and comparisons read.

recording     what every recording offers: which tensors, their digests, the tensors, the steps
differing     two recordings of one training, in the order in which ranks computed them
traces/       what the ranks of a verification write: one file in shared memory, of fixed layout
jobs/         what the ranks of a training job write: a folder, a file for each step of each rank
"""
