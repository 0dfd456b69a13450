"""A script's own training loop: the script's process, its node's, and the channel between them."""
