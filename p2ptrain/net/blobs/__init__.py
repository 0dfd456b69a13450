"""Blobs, large data in pieces: their protocol, a server, and fetching from one peer or from the swarm.

`blob` cuts and checks pieces, and `server` sends them, in the order that `turns` decides. `fetch` fetches from one
source, `swarm_fetch` from several at once while others fetch from us."""
