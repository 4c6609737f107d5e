"""The sizes and limits of one engine, and the numbers it reports."""
