"""The directories that a job writes to and reads from: room, rights, and how fast they answer."""
