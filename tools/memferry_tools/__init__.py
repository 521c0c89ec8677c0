"""The `memferry` command and what is behind it."""
