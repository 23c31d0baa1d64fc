"""The GPUs of a node, through NVIDIA's management library."""
