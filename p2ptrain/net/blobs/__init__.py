"""Large things in pieces: the protocol, the server, and fetching from one peer or from the swarm."""
