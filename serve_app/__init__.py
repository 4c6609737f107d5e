"""Serves HTTP on Ray Serve, and has the command line."""
