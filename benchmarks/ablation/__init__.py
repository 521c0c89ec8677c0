"""What each of the scheduler's ideas gains."""
