"""Quarantine: episodes that an operator does not trust leave every dataset, and policies trained on them are named.

question -> marked episodes -> resources.quarantine, which numbers and keeps the mark
         -> datasets that train on them -> checkpoints trained on these, and descendants -> which are live
dataset  -> the marked episodes of its rollouts, in its action key if there are any
retrain  -> the last policy that is not tainted, and the iteration to train again from there

question   what a mark would concern, from the ledger
members    the marked episodes of one dataset
retrain    the way back to a live policy that saw none of them
"""
