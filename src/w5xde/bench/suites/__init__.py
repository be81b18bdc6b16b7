"""The benchmarks: one module for each `w5xde bench NAME`. They measure, and `show` formats their results."""
