"""What the ranks of one world write down as they train, and how it is read again.

layout      where everything lies in the file
header      what is recorded of a step beside tensors
writer      a rank's pen
reader      tensors, digests and headers, by rank and step
files       the same in folders, sealed with checksums (seal, which says who asks for that)
"""
