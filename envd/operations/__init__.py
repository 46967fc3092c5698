"""What an operator of an envd server uses and an episode does not: the client side.

In: an envd server's address. Out: its sandboxes' files and processes, changes of their state, audit events, tables.
Nothing here is imported by the episode's side (`envd.client`); inference, ops and curation may not import it.
"""
