"""The transport over go-libp2p: the p2pd process and its life cycle, hivemind's DHT, gossip and streams."""
