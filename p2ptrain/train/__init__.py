"""How a node learns: steps on its device, and what becomes of them.

`live` is the model in training, `recipes` with `inner` turn steps into a contribution, `private` limits what that tells
of `own_data`. `trainer` joins them with the agreed state, `saved_state` is its file. `begin` makes a run's first
weights, `memory` estimates what a run needs, `evaluate` measures the held-out loss, `region` is a region's part.

Nothing here opens a socket or runs an event loop; a recipe never communicates.
"""
