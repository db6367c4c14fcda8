"""The recording of one world's ranks during training, and its reader.

layout      the place of everything in the file
header      the record of a step without tensors, and source lines
writer      writes one rank's part
reader      reads tensors, digests and headers, by rank and step
files       the same in folders; seal: their checksums, and requests to move traces
"""
