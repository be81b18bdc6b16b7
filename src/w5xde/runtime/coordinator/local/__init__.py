"""The nodes that the coordinator starts on its own machine, and the memory that it shares with them."""
