"""Parameters of requests, with the standard library only."""
