"""The protocol: frames as bytes, and which message may follow which. Knows no sockets, clocks or tensors."""
