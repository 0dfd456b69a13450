"""The edge to the network: asyncio, sockets and the libp2p daemon. Nothing here decides about rounds.

`transport` is the interface that a node uses; `libp2p` implements it with go-libp2p, and tests have one in memory.
`boundary` stands around every exchange with a peer. `mailbox` carries small messages to one peer, `questions` those
that belong to no run, `blobs` everything large. `connections` chooses whom to connect to, with an `address_book` of
each peer. `addresses` parses multiaddrs, `rate_limit` bounds what peers may take, `tasks` owns background tasks."""
