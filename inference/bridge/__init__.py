"""The gRPC bridge: episodes of trainers that are not ours. The server plays the policy, the client the environment, or
the server both.

    service, connect   the calls of contracts/protos/bridge.proto, and the stream of many episodes
        |
    sessions           the state machine of an episode: open -> stepping <-> open -> ended, any -> expired
        |                  `registry` holds them and their leases, `episode` is the data of one, `turns` samples a turn,
        |                  `checks` refuses bad input
    hosted             the environment's side of episodes that name a task
    journal, replay    what a client saw survives the process
    record             an ended episode as rows of EPISODES and SEQUENCES
    serve              runs a server of all these parts: `python -m inference bridge`
    client             the other side; needs grpcio and numpy only

In: protobuf messages with token ids. Out: the same, with log-probabilities and policy versions. May import contracts,
inference.engines and, where hosted, inference.rollouts; `client` imports no other part.
"""
