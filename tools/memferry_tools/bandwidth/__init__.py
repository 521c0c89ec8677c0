"""What ``memferry bandwidth`` does."""
