"""The links between an engine and its ranks, and from engines to the ingress, over ZeroMQ."""
