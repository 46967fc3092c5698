"""The gRPC side of envd.

    service_*      requests checked, converted and answered; `calls` is what they share
    sandboxes      what lives, by id and token; `live` is one of them, `states` and `migration` change it
    admission      what may be created: bounds and `rules`; `audit` records what was refused
    templates, snapshots, verifications, idempotency, limits_watch, backends
    toolrunner     tool calls over a sandbox's agent; `guestdiff`, `filesearch`, `textsearch` likewise
    serve          all of it together, listening as `listening` says

In: protobuf requests. Out: protobuf replies. Runs no code of a sandbox. Imports envd's lower parts and contracts;
imported by `envd.__main__` only.
"""
