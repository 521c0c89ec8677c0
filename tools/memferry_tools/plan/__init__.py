"""What ``memferry plan`` and ``memferry simulate`` do."""
