"""The edge to the network: asyncio, sockets and the libp2p daemon. Nothing here decides about rounds.

`transport` is the interface that a node uses; `libp2p` implements it with go-libp2p, and tests have one in memory.
`boundary` stands around every exchange with a peer. `mailbox` carries small messages to one peer (`mail` lists them and
their frames), `questions` those that belong to no run, `blobs` everything large. `connections` chooses whom to connect
to, with an `address_book` of each peer, and `told_dials` bounds dials to addresses that peers gave. `addresses` parses
multiaddrs, `frames` cuts byte streams, `rate_limit` bounds what peers may take, `tasks` owns background tasks.
"""
