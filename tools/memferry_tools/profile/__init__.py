"""Measuring a model's layers in every mode."""
