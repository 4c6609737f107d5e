"""Attention where a sequence's keys lie on several ranks: context parallelism (cp, dcp)."""
