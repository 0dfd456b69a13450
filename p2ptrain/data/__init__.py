"""What is trained on: from files of texts and chats to the sequences of a step.

`prepare` (with `tokenize_in_processes`) makes a data set of what `corpus` and `chats` read, by a `tokenizer`
(`tokenizer_rules`: which files are trusted; `tokenizer_trial`: loads one in a child). `dataset` reads it, in pieces
that `kept_pieces` fetches and drops; `assignment` says which sequences are whose in a round, `packing` which tokens are
learned, `run_data` whether a data set fits a run.
"""
