"""HTTP server of the inference plane: an OpenAI-compatible API over one engine that also takes and returns token ids.

In:  JSON requests (`api`). Out: JSON answers; errors in OpenAI's shape. `app` joins routes and engine, `serve` runs it.
Runs alone: `python -m inference serve`. May import contracts and inference.engines.
"""
