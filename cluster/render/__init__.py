"""Files that bring a layout to machines: Serve files, `ray up` files, Kubernetes manifests. Plain values until written."""
