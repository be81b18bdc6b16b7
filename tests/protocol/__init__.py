"""The protocol: frames split at every byte, and messages only in the states that allow them."""
