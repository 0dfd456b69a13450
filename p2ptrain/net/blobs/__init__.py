"""Blobs, large data in pieces: their protocol, a server, and fetching from one peer or from the swarm."""
