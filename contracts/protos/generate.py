"""Generate `contracts/pb/` from every .proto file beside this script (`make proto` calls it)."""

import os
import sys
from pathlib import Path

PROTOS = Path(__file__).resolve().parent
ROOT = PROTOS.parent.parent
PACKAGE_DOC = '"""Generated protobuf and gRPC code: `make proto` rewrites this package."""\n'


def main() -> int:
    """Write `<name>_pb2.py`, `_pb2.pyi` and `_pb2_grpc.py` for each proto; the exit code is protoc's."""
    from grpc_tools import protoc

    out = PROTOS.parent / "pb"
    out.mkdir(exist_ok=True)
    (out / "__init__.py").write_text(PACKAGE_DOC)
    # With the proto directory mapped onto contracts/pb the generated imports read `from contracts.pb import x_pb2`.
    protos = [f"contracts/pb/{path.name}" for path in sorted(PROTOS.glob("*.proto"))]
    flags = [f"--{kind}=." for kind in ("python_out", "pyi_out", "grpc_python_out")]
    os.chdir(ROOT)
    return int(protoc.main(["protoc", f"-Icontracts/pb={PROTOS}", *flags, *protos]))


if __name__ == "__main__":
    sys.exit(main())
