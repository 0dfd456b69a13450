"""The transport over go-libp2p: the p2pd process and its life cycle, hivemind's DHT, gossip and streams.

`p2pd` implements the transport, and sets it up again after a restart. `process` starts and stops the daemon, and keeps
it running, `control` sends it requests, and small ones of peers, over its Unix socket, `autorelay` chooses its relays.
`pubsub` is gossip, `streams` accepts streams. `dht` bounds and signs hivemind's DHT, of which `slim_hivemind` imports
only the parts in use."""
