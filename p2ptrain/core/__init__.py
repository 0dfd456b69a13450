"""The protocol as a pure function: events and the current time in, effects out.

Nothing here reads a clock, uses global randomness, touches a file, socket or thread, or sees a tensor. That is why
hundreds of nodes can run in one process under virtual time, and why a failure in the field can be replayed offline.
The package imports only itself, the standard library, msgspec, blake3, and three leaves of p2ptrain: config, errors
and digest. A test enforces this.
"""
