"""What runs sandboxes: one small protocol (`envd.backends.base`) and a folder a backend.

A backend named NAME is `envd/backends/NAME/backend.py` with `async def start(run_dir, ...) -> Backend`, and its name
below; tests/envd/test_backend_contract.py holds every backend to the protocol. `vm` is what virtual machines share.
Imports nothing of the server.
"""

from typing import Literal, get_args

BackendName = Literal["namespaces", "plain", "gvisor", "qemu", "firecracker", "pods"]
"""All of them, by the names that `--backend` and an experiment's `sandboxes.backend` take."""
BACKENDS: tuple[BackendName, ...] = get_args(BackendName)
AUTO = ("namespaces", "gvisor")
"""What `--backend auto` tries, in this order; never one that isolates nothing."""
