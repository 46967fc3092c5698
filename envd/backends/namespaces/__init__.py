"""Sandboxes in namespaces of the host's kernel: `backend` sends requests to the native spawner through `spawner`."""
