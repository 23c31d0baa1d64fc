"""What this machine has to give: memory, limits, processors, clocks, and what earlier jobs left behind."""
