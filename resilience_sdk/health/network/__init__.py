"""The ways to the other nodes: fabric ports, interfaces, names, and the rendezvous."""
