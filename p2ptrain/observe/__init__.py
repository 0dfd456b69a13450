"""Everything a node shows: HTTP, metrics, records, logs and the terminal. It only reads, and decides nothing."""
