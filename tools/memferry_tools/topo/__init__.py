"""What ``memferry topo`` does."""
