"""Fast paths for small batches: recorded, grouped and computed ahead, with the same bits."""
