"""The inference plane's HTTP server: an OpenAI-compatible API over one engine, which also takes and returns token ids.

In:  JSON requests (`api`). Out: JSON answers; errors in OpenAI's shape. `app` joins routes and engine, `serve` runs it.
Runs alone: `python -m inference serve`. May import contracts and inference.engines.
"""
