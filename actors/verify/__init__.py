"""Does a layout compute what one rank computes? Cases, a recorder on every rank, and the verdict."""
