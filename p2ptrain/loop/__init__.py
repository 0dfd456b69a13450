"""A script's own training loop: the script's process, its node's, and the channel between them.

`channel` carries messages over a pair of sockets, and weights in shared memory. In the process of the node, `worker`
lets the script take the local steps. `simulated` trains a whole swarm in one process."""
