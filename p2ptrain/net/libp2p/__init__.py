"""The transport by go-libp2p: p2pd as a process, its life, hivemind's DHT, gossip and streams."""
