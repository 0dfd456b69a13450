"""The edge to the network: asyncio, sockets and the libp2p daemon. Nothing here decides about rounds."""
