"""Puts replicas on a Ray cluster and keeps them alive."""
