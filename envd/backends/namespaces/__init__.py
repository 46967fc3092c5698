"""Sandboxes in namespaces of the host's kernel: `backend` asks `spawner`, the native program that forks them."""
