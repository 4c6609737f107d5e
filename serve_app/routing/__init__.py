"""Which replica gets a request: the backends behind the HTTP endpoint, pools, and hand-offs between them."""
