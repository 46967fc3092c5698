"""Health checks of containers that have no curl: `health.py http://host:port/path`, `health.py unix:/run/envd.sock`
(envd over gRPC) or `health.py bridge:unix:/run/bridge.sock`.
"""

from __future__ import annotations

import asyncio
import sys
import urllib.request

TIMEOUT_S = 10.0


def main(address: str) -> int:
    """Exit status 0 when what listens at `address` answers as it should."""
    try:
        if address.startswith("http"):
            with urllib.request.urlopen(address, timeout=TIMEOUT_S) as answer:
                print(answer.status)
        elif address.startswith("bridge:"):
            print(asyncio.run(_ask_bridge(address.removeprefix("bridge:"))))
        else:
            print(asyncio.run(_ask_envd(address)))
    except Exception as error:  # noqa: BLE001 - whatever it is, the answer to "is it healthy?" is no
        print(f"{address}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


async def _ask_envd(address: str) -> str:
    from envd.operations.client import OperationsClient

    async with asyncio.timeout(TIMEOUT_S), OperationsClient(address) as client:
        about = await client.info()
    return f"{about.backend}, isolates: {about.isolation}, sandboxes: {about.live}"


async def _ask_bridge(address: str) -> str:
    from inference.bridge.client import BridgeClient

    async with asyncio.timeout(TIMEOUT_S), BridgeClient(address) as client:
        info = await client.info()
    return f"policy {', '.join(info.versions)}, tasks: {info.hosted_tasks}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
