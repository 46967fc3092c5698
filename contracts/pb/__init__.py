"""Generated protobuf and gRPC code: `make proto` rewrites this package."""
