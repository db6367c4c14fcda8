"""The recording of one world's ranks during training, and its reader.

layout      the place of everything in the file
header      the non-tensor record of a step, and source lines
writer      writes one rank's part
reader      tensors, digests and headers, by rank and step
files       the same in folders, sealed with checksums (seal, which has the requests for that)
"""
