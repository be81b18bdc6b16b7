"""The benchmarks, one module for each: what `w5xde bench NAME` runs."""
