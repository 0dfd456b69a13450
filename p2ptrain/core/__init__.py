"""The protocol as a pure function: events and the current time in, effects out.

Nothing here reads a clock, uses global randomness, touches a file, socket or thread, or sees a tensor. That is why
hundreds of nodes can run in one process under virtual time, and why a failure in the field can be replayed offline.
The package imports only itself, the standard library, msgspec, blake3, and three leaves of p2ptrain: config, errors
and digest. A test enforces this.

`events` has every event and effect on one screen, `effect_queue` the order in which effects are carried out. `node`
hands events to its `participant`, which joins the parts below; they share a `context`, and `inbox` routes messages.

- The agreed state: `messages` and `wire` decode, `roster`, `state` and `manifest` are what all members share,
  `agreement` is Tendermint for one round. `succession` is how members agree on the run that follows, `origin` how that
  proves where it comes from.
- One round as a node lives it: `round`, with `arrivals` (how long contributions take), `collecting` (whom to wait for,
  and until when), `newcomers` (how long a short round stays open for them), `pace` (local steps of a slow machine) and
  `sizing` (how large a contribution the line carries in time).
- Getting what is missing: `pools` has what rounds share, such as `offers` and `payloads` (contributions); `questions`
  asks for messages by name, `repair` for lost ones.
- The past: `history` and `chain` keep certified rounds, `catchup` follows the history of peers that are ahead,
  `regroup` goes on without a quorum, `trust` waits for a head that a person vouches for.
- This node: `voice` is what it has said and may not contradict, `local_work` decides when to train and apply, `overlap`
  whether to train on while a round is agreed on, `membership` asks to be admitted and leaves, `journal` folds the saved
  records into a state to start from.
- Others: `admission` (who comes and goes), `reputation` (misbehaviour), `audits` (who counts, by what members measured)
  and `auditing` (what this node measures); for display `tally` (what became of
  contributions, and what members report).
- To the outside: `view` is what may be seen of a node, `complaints` are its problems as data."""
