"""Files that bring a layout to machines: for Serve, `ray up` and KubeRay."""
