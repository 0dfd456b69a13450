"""The arithmetic of a round as programs for a card, in Triton, which torch's wheels for CUDA bring.

One program a chunk, one launch a stage for the whole model: `programs` has those of transform, codec and aggregate,
`blake` those of the digests, `launches` starts them. Nothing of a contribution but its payload crosses the bus. They
compute what torch does in the modules beside this one, on all other machines: to the bit, where others check it.
Payloads are checked in main memory, in C, while the card trains: a verdict from the card would be a wait for it."""
