"""A region: a run whose nodes together are one contributor to another run, the world's.

`shift` keeps track of both runs, and `world` trains from the weights that the world has agreed on, and runs this
machine's node in the world's run, in a process of its own."""
