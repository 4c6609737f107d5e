"""Ownership: which rank holds which weight slices, KV blocks and tokens under any layout."""
