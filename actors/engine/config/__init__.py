"""The configuration of one engine (sizes and limits), and the statistics that it reports."""
