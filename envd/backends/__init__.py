"""Backends that run sandboxes: one small protocol (`envd.backends.base`) and one folder per backend.

A backend named NAME is `envd/backends/NAME/backend.py` with `async def start(run_dir, ...) -> Backend`, and its name
below; tests/envd/test_backend_contract.py tests every backend against the protocol. `vm` has the code shared by virtual
machines. Imports nothing of the server.
"""

from typing import Literal, get_args

BackendName = Literal["namespaces", "plain", "gvisor", "qemu", "firecracker", "pods"]
"""Names of all backends, as `--backend` and an experiment's `sandboxes.backend` take them."""
BACKENDS: tuple[BackendName, ...] = get_args(BackendName)
AUTO = ("namespaces", "gvisor")
"""Backends that `--backend auto` tries, in this order; never one without isolation."""
