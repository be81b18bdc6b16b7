"""The node process: its connection, its worker, and the fork server that starts local nodes."""
