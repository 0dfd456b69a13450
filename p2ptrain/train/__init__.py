"""How a node learns: it takes steps on its device, and makes contributions of them.

`live` is the model in training, whose layers `compiling` compiles; `recipes` with `inner` and `residual` turn steps
into a contribution, `private` limits how much it reveals of `own_data`. `learner` joins them, beside a replica of the
agreed state; `saved_state` is its file. `begin` makes a run's first weights, `devices` finds the one that trains,
`memory` estimates a run's needs, `evaluate` measures the held-out loss, and `matched_filter` judges whether a
contribution comes from its author's own sequences.

Nothing here opens a socket or runs an event loop; a recipe never communicates."""
