"""Request routing: the backends behind the HTTP endpoint, the pools, and the KV hand-offs between them."""
