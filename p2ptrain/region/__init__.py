"""A region: a run whose nodes together are one contributor to another run, the world's.

`shift` keeps track of both, `worker` is a worker that trains from what the world has agreed on, and `world` joins this
node to the world's run by a second node in a process of its own.
"""
