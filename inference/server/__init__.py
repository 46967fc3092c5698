"""HTTP server of the inference plane: an OpenAI-compatible API, with token ids, for one engine.

In: JSON requests (`api`). Out: JSON replies; errors in OpenAI's format. `app` connects routes and engine, `serve` runs
it. Runs alone: `python -m inference serve`. `route` passes requests on to several servers, each to the one that has
most of its prompt cached: `python -m inference route`. May import contracts, inference.engines and inference.router.
"""
