"""Whether each device computes right, and as fast as its neighbours: a product whose checksum is known."""
