"""The ledger: an index of artifacts, lineage, episodes, grades and costs, to answer questions in constant time.

    asset materialized -> resources.refs notes it as pending
    end of an iteration, or a question -> update: manifests of pending artifacts and their parents -> a segment
    questions -> DuckDB over the segments' Parquet files

    segments   files of the index in the store: append-only, merged in powers of 16
    rows       the rows of one artifact
    index      update, rebuild
    recall     what saw an episode, a task, a tool or a reward rule; what was trained on it; what of that is live

The ledger is derived from manifests and can be rebuilt; no step reads it. Groups of unfinished iterations are not in
it.
"""
