"""One client for the requests of tests: `httpx.get` would read the system's certificates each time, for 20 ms."""

import httpx

HTTP = httpx.Client(limits=httpx.Limits(max_keepalive_connections=0))
