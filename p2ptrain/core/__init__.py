"""The protocol as a pure function: events and the time in, effects out.

Nothing here reads a clock, draws from a global generator, touches a file, a socket or a thread, or sees a
tensor. So hundreds of nodes run in one process under virtual time, and what broke in the field can be
replayed at a desk. It imports itself, the standard library, msgspec and blake3, and the package's leaves:
config, errors and digest. A test reads the imports.
"""
