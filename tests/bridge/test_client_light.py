"""What the client needs: grpcio, numpy and protobuf."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CODE = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "pyarrow", "dagster", "transformers", "pydantic", "boto3", "tokenizers"}:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
import inference.bridge.client as client

outside = {name.split(".")[0] for name, module in sys.modules.items()
           if "site-packages" in (getattr(module, "__file__", None) or "")}
print(" ".join(sorted(outside)))
ours = {name for name in sys.modules if name.startswith("inference.bridge.") and ".client" not in name}
print(" ".join(sorted(ours)))
client.Bridge("unix:/nowhere"), client.BridgeClient("unix:/nowhere")
"""


def test_client_imports_grpc_numpy_and_protobuf_only() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", CODE], cwd=root, capture_output=True, text=True, check=True)
    outside, ours = done.stdout.splitlines()
    others = {name for name in outside.split() if not name.startswith(("grpc", "_"))}
    assert others <= {"numpy", "google", "typing_extensions"}
    assert ours == "inference.bridge.errors"
