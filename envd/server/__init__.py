"""The gRPC side of envd.

    service_*      the gRPC services: check, convert and answer requests; `calls` holds their common parts
    sandboxes      live sandboxes by id and token; `live` is one of them, `states` and `migration` change its state
    admission      checks creations against bounds and `rules`; `audit` records refusals
    templates, snapshots, verifications, idempotency, limits_watch, backends
    toolrunner     tool calls over a sandbox's agent; `guestdiff`, `filesearch`, `textsearch` likewise
    serve          runs a server of all these parts

In: protobuf requests. Out: protobuf replies. Runs no code of a sandbox. Imports envd's lower parts and contracts;
imported by `envd.__main__` only.
"""
