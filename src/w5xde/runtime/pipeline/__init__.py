"""The update pipeline: the way of an update through the coordinator, on ports that the simulator fills."""
