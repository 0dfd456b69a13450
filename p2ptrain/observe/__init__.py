"""What a node shows over HTTP: read only, and nothing of it is decided here."""
