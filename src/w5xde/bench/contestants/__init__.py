"""The contestants: w5xde itself, DDP, Ray, light nodes, and the limits of the machine. They show nothing."""
