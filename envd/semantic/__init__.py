"""Semantic search: files -> chunks by syntax -> vectors -> Qdrant -> the nearest chunks to a question.

In: files' bytes and a query. Out: pieces of code. Runs on the server, in threads; it never runs what it reads. Needs
`pip install 'triplane[search]'`. Imports nothing of ours but envd.errors.
"""
