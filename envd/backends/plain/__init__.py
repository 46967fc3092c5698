"""Sandboxes that are ordinary processes and isolate nothing, for trusted code."""
