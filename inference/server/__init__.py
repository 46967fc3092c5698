"""HTTP server of the inference plane: an OpenAI-compatible API, with token ids, for one engine.

In: JSON requests (`api`). Out: JSON replies; errors in OpenAI's format. `app` connects routes and engine, `serve` runs
it. Runs alone: `python -m inference serve`. May import contracts and inference.engines.
"""
