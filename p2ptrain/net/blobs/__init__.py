"""Blobs, large data in pieces: their protocol, a server, and fetching from one peer or from the swarm.

`blob` cuts and checks pieces, `server` sends them, in the order that `turns` decides, and `shared` encodes what many
ask for only once. `fetch` fetches from one source, `swarm_fetch` from several at once while others fetch from us.
"""
