"""No code, nothing unbounded: whatever bytes a peer or a file holds, they are data, and never too many."""
