"""A node as a process: how it is put together, started, and lives.

`launch` starts a run, joins one, and lists what there is; `assembly` puts a node together; `life` runs it, with its
interfaces, until it has left. `script` is the same beside a script, which starts it as a process and takes the steps.
Everything is imported here, and only the command line and the library import this.
"""
