"""Codecs: turn a flat vector into the bytes that travel, and back.

compressors.py   zlib, lz4 and zstd, each with an exact limit on what decompression may give
blocks.py        bytes in blocks of one MiB: shuffled and compressed on all cores
numbers.py       fewer bits for each float: fp16, bf16, int8
four_bits.py     4 bits for each difference, 8 for each statistic: q4
pipeline.py      the stages of one spec together, and the registry of stages
feedback.py      adds the rounding error of one int8 or q4 update to the next
sender.py        encodes for one direction of one peer, and measures codecs for `auto`
receiver.py      checks an encoded vector against what was agreed, and decodes it

Know no sockets and no clock.
"""
