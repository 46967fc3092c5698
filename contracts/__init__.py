"""Definitions that the planes share: formats, names and digests. Computes nothing.

In: rows, bytes and JSON from any plane. Out: the same, as immutable artifacts with digests. `digests` identifies
content, `store` holds bytes (in a directory or S3), `artifacts` groups files under a manifest, `upkeep` checks a store
and reclaims space, `pointers` names the current artifact, `episodes` and `tasks` are the tables, `chat` turns messages
into tokens, `checkpoints` describes the layout of a policy, `tracing` makes spans.

May import: the standard library, numpy, pyarrow, pydantic, boto3, tokenizers, protobuf, and opentelemetry where it is
installed. Never torch, dagster or another package of this repository. grpc is imported in `contracts.rpc` alone, the
common parts of gRPC servers (`contracts.pb` holds generated protobuf code, its grpc stubs are imported by the planes
that serve them).
"""
