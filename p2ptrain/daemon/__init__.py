"""A node as a process: how it is put together, started, and lives.

An `order` says which run to start or to join; `launch` carries it out, and lists what there is; `assembly` puts a node
together and records its events; `life` runs it, with its interfaces, until it has left. `script` is the same beside a
script, which starts it as a process and takes the steps; `script_loop` is how the node sees that script.
Everything is imported here, and only the command line and the library import this."""
