"""Attention over a sequence whose keys lie on several ranks: context parallelism (CP) and decode context parallelism (DCP)."""
