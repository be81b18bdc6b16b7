"""Codecs: what turns a flat vector into what travels, and back.

pipeline.py      a spec as something that encodes and decodes; the registry of stages
numbers.py       fewer bits for each number: fp16, bf16, int8
compressors.py   zlib, lz4, zstd, each with a limit on what comes out
blocks.py        one MiB at a time: shuffled, compressed, on all cores
feedback.py      what int8 took, sent later
sender.py        one direction to one peer: which spec, by what was measured
"""
