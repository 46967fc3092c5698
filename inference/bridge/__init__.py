"""The gRPC bridge: episodes of trainers that are not ours. The client plays the environment, the server the policy.

    service, connect   the calls of contracts/protos/bridge.proto, and the stream of many episodes
        |
    sessions           the state machine of an episode: open -> stepping <-> open -> ended, any -> expired
        |                  `registry` holds them and their leases, `episode` is the data of one, `turns` samples a turn,
        |                  `checks` refuses bad input
    journal, replay    what a client saw survives the process
    record             an ended episode as rows of EPISODES and SEQUENCES
    serve              runs a server of all these parts: `python -m inference bridge`
    client             the other side; needs grpcio and numpy only

In: protobuf messages with token ids. Out: the same, with log-probabilities and policy versions. May import contracts
and inference.engines; `client` imports no other part.
"""
