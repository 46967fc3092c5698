"""The report of an iteration: one self-contained HTML page that needs no network, from committed artifacts.

    store -> sources (artifacts of an iteration) -> history (a row an iteration)  --.
                                                 -> facts (histograms, families, costs) --> build: summary.json
                                                    (in the digest)
                                                 -> episodes (tokens, calls, diffs, verdicts) --> page: report.html
                                                    (a view, outside the digest)

In: artifacts of one iteration, the rows of earlier reports, seconds that Dagster measured. Out: an artifact of kind
`report`. All text of a policy enters the page as compressed data and becomes text nodes only; `web/` holds the page's
own markup, style and script.

Imported by assets and triplane_dagster. May import: dagster (timings only), resources and what lies below.
"""

ROUTE = "/reports"
"""Path of reports on Triplane's web server: ROUTE/<action key>.

Without host and port, so that links work behind any address.
"""
