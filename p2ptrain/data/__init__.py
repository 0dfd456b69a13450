"""The training data: from files of texts and chats to the sequences of a step.

`prepare` makes a data set: `corpus` and `chats` read documents, a `tokenizer` turns them into tokens (`tokenizer_rules`
decides which files are trusted, `tokenizer_trial` loads one in a child). `dataset` reads it in pieces, of which
`kept_pieces` stores as many as there is room for. `assignment` gives each node its sequences of a round, `packing`
finds the tokens that are learned or draws those that are to be filled in, and `run_data` checks that a set fits a run.
"""
