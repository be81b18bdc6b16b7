"""Files for Slurm: a job for the coordinator, an array of jobs for the nodes, and a script to submit them."""
