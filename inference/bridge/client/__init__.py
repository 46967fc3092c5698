"""Client of the bridge, for a trainer that is not ours: episodes by token ids over one stream.

    episode.step ----> link: commands ----> Connect ----> bridge
    turns      <---- received: checks <---- events <----

    client     BridgeClient: starts, attaches to, scores; renews the leases of its episodes
    episode    Episode: steps, streams, ends
    plain      Bridge: the same without asyncio
    link       one Connect stream: credits, and after a lost connection the unfinished commands again
    commands   what is sent, and who waits for the answer
    received   tokens of a turn as they come: none lost, doubled or changed
    unary      calls beside the stream
    access     address, TLS and keys
    tokens     arrays of ids and the types of sampling and turns

In: token ids as numpy arrays or sequences. Out: numpy arrays (ids int32, log-probabilities float32). Needs grpcio,
numpy and protobuf only. May import contracts and the errors of the bridge.

A process that opens no other gRPC channel before saves a tenth of a millisecond of each call with
`contracts.rpc.connecting.prefer_short_round_trips()`.
"""

from inference.bridge.client.client import BridgeClient
from inference.bridge.client.episode import Episode
from inference.bridge.client.errors import AccessDenied, BridgeUnreachable, RecordCorrupt, TokensChanged
from inference.bridge.client.plain import Bridge, PlainEpisode
from inference.bridge.client.tokens import Finish, Info, Piece, Record, Reply, Sampling, Score, Span, ToolResult, Turn
from inference.bridge.errors import BridgeError

__all__ = [
    "AccessDenied",
    "Bridge",
    "BridgeClient",
    "BridgeError",
    "BridgeUnreachable",
    "Episode",
    "Finish",
    "Info",
    "Piece",
    "PlainEpisode",
    "Record",
    "RecordCorrupt",
    "Reply",
    "Sampling",
    "Score",
    "Span",
    "TokensChanged",
    "ToolResult",
    "Turn",
]
