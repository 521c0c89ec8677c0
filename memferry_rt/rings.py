"""Sizes of the ring through which optimizer state is streamed past the device's kernel."""

SLOTS = 3  # one comes in, one is computed, one goes out
BYTES = 18  # an element in the ring: fp32 parameter and moments, and at most 6 bytes of gradient and new weight
UNIT = 64  # elements; every array of a slot begins at a multiple of 128 bytes
