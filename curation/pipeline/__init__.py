"""Data pipelines: tables of rows from a source through stages into a versioned artifact, in bounded memory.

    source --batches--> stages of rows --parts--> files --> keys of all rows --> selection --> next stages ... --> sink
    (Parquet,           (sql, where, map, sample: worker    (distinct, cap, balance, sample: DuckDB, on disk)   (Parquet
     JSON lines,         processes; join, ask: network)                                                          in the
     database)                                                                                                   store)

`config` holds the settings of a YAML file, `plan` checks them and derives schemas and keys, `runner` runs them,
`versions` names the results. A batch is committed when it has passed all stages up to the next selection: a killed run
computes the others only. The batches in flight are limited, and the artifact does not depend on their number.
"""
