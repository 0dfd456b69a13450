"""The transport over go-libp2p: the p2pd process and its life cycle, hivemind's DHT, gossip and streams.

`p2pd` implements the transport. `process` starts and stops the daemon, `supervisor` keeps it running, `reconnect`
restores connections after a restart, `control` sends it requests over its Unix `sockets`, `autorelay` chooses its
relays. `pubsub` with `subscription` is gossip, `streams` accepts streams, `unary` carries small requests. `dht` with
`dht_protocol` and `dht_records` bounds and signs hivemind's DHT, of which `slim_hivemind` imports only the parts in
use.
"""
