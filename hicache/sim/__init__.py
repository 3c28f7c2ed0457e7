"""The simulated world: copies, faults, bugs, and the run that puts ranks, workload and logs together."""
