"""Sandboxes as microVMs under Firecracker: `machine` controls one."""
