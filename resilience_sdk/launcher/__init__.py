"""`resilience run`: torch's elastic agent with workers, restarts and decisions of our own."""
