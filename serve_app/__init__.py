"""The HTTP service on Ray Serve, and the command line."""
