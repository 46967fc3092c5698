"""Sandboxes as microVMs under Firecracker: `machine` is one of them."""
